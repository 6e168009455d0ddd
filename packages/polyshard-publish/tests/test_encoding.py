"""Digests and patches, by arithmetic: whatever changes, wherever it lies, arrives or is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyshard_publish import PublishError
from polyshard_publish.blocks import Block
from polyshard_publish.digests import bits, block_digests, digest, digest_of, wrapped
from polyshard_publish.patches import (
    Patch,
    changed_blocks,
    changed_elements,
    read_gaps,
    write_gaps,
)

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
SIZES = st.integers(1, 7)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits, NaNs and infinities among them; booleans have two values."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return memory.view(dtype).view(shape)


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(bits(one), bits(other))


@given(
    shape=st.lists(SIZES, max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_parts_add_up_to_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: Any
) -> None:
    """However a tensor is cut, and cut again, the digests of its parts are its digest."""
    tensor = values(shape, dtype, seed)

    def summed(part: Tensor, offsets: list[int], cuts: int) -> int:
        if not cuts or part.ndim == 0:
            return digest(part, offsets)
        dim = data.draw(st.integers(0, part.ndim - 1))
        at = data.draw(st.integers(0, part.shape[dim]))
        later = [o + at * (d == dim) for d, o in enumerate(offsets)]
        first = part.narrow(dim, 0, at)
        second = part.narrow(dim, at, part.shape[dim] - at)
        return summed(first, offsets, cuts - 1) + summed(second, later, cuts - 1)

    assert wrapped(summed(tensor, [0] * tensor.ndim, 3)) == digest_of(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32])
def test_one_row_may_have_any_stride(dtype: torch.dtype) -> None:
    part = values((1, 9), dtype, 0).narrow(1, 0, 8)  # contiguous, with a stride of 9
    assert part.is_contiguous()
    assert digest_of(part) == digest_of(part.clone().view(8).view(1, 8))


@given(
    shape=st.lists(SIZES, min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from([d for d in DTYPES if d != torch.bool]),
    seed=st.integers(0, 999),
    bit=st.integers(0, 10_000),
)
def test_every_flipped_bit_is_found(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, bit: int
) -> None:
    tensor = values(shape, dtype, seed)
    before = digest_of(tensor)
    memory = tensor.view(-1).view(torch.uint8)
    memory[bit // 8 % memory.numel()] ^= 1 << bit % 8
    assert digest_of(tensor) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_goes_wrong_on_the_way_is_found(dtype: torch.dtype) -> None:
    """Rows exchanged, a chunk of zeros, a chunk of another time, two signs flipped."""
    torch.manual_seed(0)
    right = torch.randn(64, 48).to(dtype)
    wrong = {}
    wrong["exchanged"] = right.clone()
    wrong["exchanged"][[3, 40]] = right[[40, 3]]
    wrong["zeros"] = right.clone()
    wrong["zeros"][16:32] = 0
    wrong["stale"] = right.clone()
    wrong["stale"][:, 7:9] = torch.randn(64, 2).to(dtype)
    for places in ([(0, 0), (0, 1)], [(0, 0), (1, 0)], [(5, 5), (60, 47)]):
        flipped = right.clone()
        for place in places:
            flipped[place] *= -1
        wrong[f"signs at {places}"] = flipped
    wrong["transposed blocks"] = right.view(2, 32, 48).flip(0).reshape(64, 48)
    found = {name: digest_of(one) for name, one in wrong.items()}
    assert digest_of(right) not in found.values()
    assert len(set(found.values())) == len(found)


def test_blocks_say_where_something_changed() -> None:
    torch.manual_seed(0)
    old = torch.randn(1000)
    new = old.clone()
    new[[3, 999]] += 1
    differ = block_digests(old, 64) != block_digests(new, 64)
    assert differ.nonzero().flatten().tolist() == [0, 15]


@given(st.sets(st.integers(0, 200_000), max_size=60))
def test_positions_come_back(positions: set[int]) -> None:
    given_ = np.array(sorted(positions), dtype=np.int64)
    content = write_gaps(given_)
    assert read_gaps(content).tolist() == given_.tolist()
    assert len(content) <= len(given_) + 200_000 // 255


@given(
    shape=st.lists(SIZES, min_size=1, max_size=3).map(tuple),
    around=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
    part=st.sampled_from([0.0, 0.03, 0.5, 1.0]),
    grain=st.sampled_from([0, 1, 3, 5]),
)
def test_patches_make_new_of_old(
    shape: tuple[int, ...],
    around: list[int],
    dtype: torch.dtype,
    seed: int,
    part: float,
    grain: int,
) -> None:
    """Written, read, put into a larger tensor: the box is new, the rest as it was; and back.

    ``grain`` 0 stands for single elements, others for digests of blocks.
    """
    old, other = values(shape, dtype, seed), values(shape, dtype, seed + 1)
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < part
    new = torch.where(chosen, bits_like(other), bits_like(old)).view(old.dtype).view(shape)
    offsets = tuple(around[: len(shape)])
    block = Block(offsets, shape)
    if grain:
        patch, _ = changed_blocks(
            "w", block, block_digests(old.view(-1), grain), new.view(-1), grain
        )
    else:
        patch = changed_elements("w", block, old.view(-1), new.view(-1))
    assert (patch is None) == same(old, new)
    if patch is None:
        return
    whole = values(tuple(o + n + 1 for o, n in zip(offsets, shape, strict=True)), dtype, seed + 2)
    whole[block.slices()] = old
    wanted, before = whole.clone(), whole.clone()
    wanted[block.slices()] = new
    content = memoryview(bytearray(b"".join(patch.content())))
    assert len(content) == patch.nbytes <= new.nbytes + 1
    back = Patch.read(patch.head(), content, dtype).swap(whole)
    assert same(whole, wanted)
    back.swap(whole)
    assert same(whole, before)


def bits_like(tensor: Tensor) -> Tensor:
    """The same memory as integers of the elements' size."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.itemsize])


@pytest.mark.parametrize("name", ["gap_bytes", "codes", "grain", "sizes", "offsets"])
def test_damaged_patches_are_refused(name: str) -> None:
    old = torch.randn(40, dtype=torch.bfloat16)
    new = old.clone()
    new[[3, 17, 18]] = old[[3, 17, 18]] * (1 + 2**-7)
    patch = changed_elements("w", Block((0,), (40,)), old, new)
    assert patch is not None
    content = memoryview(bytearray(b"".join(patch.content())))
    for wrong in (None, -1, "x", 1_000_000, [0, 0], [-1]):
        head = patch.head() | {name: wrong}
        with pytest.raises(PublishError, match="a patch that cannot be read"):
            Patch.read(head, content, torch.bfloat16)
    with pytest.raises(PublishError, match="a patch that cannot be read"):
        Patch.read(patch.head(), content[:-1], torch.bfloat16)


def test_small_steps_take_few_bytes() -> None:
    """The bar for reinforcement learning: at most 5 % at 1e-6, of weights with a spread of 0.02.

    Every weight moves by the whole learning rate, as in Adam's first step: the most it can.
    """
    torch.manual_seed(0)
    old = torch.randn(500_000) * 0.02
    new = old - 1e-6 * torch.randn_like(old).sign()
    block = Block((0,), (500_000,))
    patch = changed_elements("w", block, old.bfloat16(), new.bfloat16())
    assert patch is not None
    assert patch.nbytes <= 0.05 * 2 * old.numel()
    assert changed_elements("w", block, old.bfloat16(), old.bfloat16()) is None
