"""Digests of memory: every burst of flipped bits changes them; arithmetic by hand for the rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyshard_resilience.guards.digests import CHUNK_WORDS, digest, place_of, summary

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64)
CHUNK_BYTES = 8 * CHUNK_WORDS
SIZES = st.one_of(
    st.integers(1, 200), st.integers(CHUNK_BYTES // 8 - 9, CHUNK_BYTES // 8 + 9).map((8).__mul__)
)


def random_bytes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def flip(memory: Tensor, first: int, pattern: int) -> None:
    """Flip the bits of ``pattern`` (bit 0 first) from bit ``first`` of the bytes on."""
    place = 0
    while pattern >> place:
        bit = first + place
        if pattern >> place & 1 and bit < 8 * memory.numel():
            memory[bit // 8] ^= 1 << bit % 8
        place += 1


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(0, 2**32), st.integers(0, 2**64), st.integers(0, 2**63 - 1))
@example(16, 0, 63, (1 << 63) - 1)
@example(16, 0, 1, (1 << 63) - 1)
def test_every_burst_of_64_bits_is_found(size: int, seed: int, first: int, rest: int) -> None:
    memory = random_bytes(size, seed)
    before = digest(memory)
    flip(memory, first % (8 * size), 1 | rest << 1)  # a burst begins with a flipped bit
    after = digest(memory)
    assert before.shape == after.shape
    assert not torch.equal(before, after)
    if int((before != after).sum()) == 1:
        assert summary(before) != summary(after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_of_every_dtype_is_found(dtype: torch.dtype) -> None:
    memory = random_bytes(48, 1)
    values = memory.view(dtype).view(-1, 2)
    before = digest(values)
    for bit in range(8 * 48):
        flip(memory, bit, 1)
        assert not torch.equal(digest(values), before)
        flip(memory, bit, 1)
    assert torch.equal(digest(values), before)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32), st.lists(st.integers(0, 40 * CHUNK_BYTES - 1), min_size=1, unique=True)
)
def test_flips_in_many_places_are_found(seed: int, bits: list[int]) -> None:
    memory = random_bytes(5 * CHUNK_BYTES, 0)
    before = digest(memory)
    for bit in bits:
        flip(memory, bit, 1)
    changed = not torch.equal(digest(memory), before)
    if len({bit // 64 for bit in bits}) == 1 or len({bit % 64 for bit in bits}) == len(bits):
        assert changed  # powers of two that are all different have no sum of zero


def test_sums_are_those_of_words_by_hand() -> None:
    memory = random_bytes(CHUNK_BYTES + 20, 3)
    words = [int.from_bytes(memory[i : i + 8].numpy().tobytes(), "little") for i in range(0, 10, 8)]
    sums = [int(s) % 2**64 for s in digest(memory[:16])]
    assert sums == [sum(words) % 2**64]
    assert digest(memory).numel() == 3  # a whole chunk, the words behind it, the last 4 bytes
    last = int.from_bytes(memory[-4:].numpy().tobytes(), "little")
    assert int(digest(memory)[-1]) == last


def test_views_of_any_form_have_the_digest_of_their_values() -> None:
    values = torch.arange(60, dtype=torch.float32).view(6, 10)
    for view in (
        values.t(),
        values[1:3],
        values[:, 3],
        values[0, 1],
        values.to(torch.complex64).conj(),
    ):
        assert torch.equal(digest(view), digest(view.clone(memory_format=torch.contiguous_format)))
    assert digest(values[:0]).numel() == 0
    assert digest(torch.empty(4, device="meta")).numel() == 0


def test_the_place_of_a_change_is_told() -> None:
    memory = random_bytes(3 * CHUNK_BYTES + 9, 0)
    before = digest(memory)
    for byte in (0, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 8):
        memory[byte] ^= 4
        start, stop = place_of(before, digest(memory), memory.numel())
        assert start <= byte < stop <= memory.numel()
        assert stop - start <= CHUNK_BYTES
        memory[byte] ^= 4


@pytest.mark.gpu
def test_accelerators_have_the_same_sums() -> None:
    device = torch.accelerator.current_accelerator()
    values = torch.randn(100_003)
    assert torch.equal(digest(values.to(device)).cpu(), digest(values))
