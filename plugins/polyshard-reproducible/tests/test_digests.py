"""Digests: independent of how rows are divided, and no bit of an element is lost."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyshard_reproducible.digests import MASK, digest
from polyshard_reproducible.parts import Cut, Part, part_of
from polyshard_testing import ranks

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.int32,
    torch.bool, torch.uint8, torch.complex64, torch.complex128,
]  # fmt: skip

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).itemsize
    raw = torch.randint(256, (*shape, size), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return raw.view(shape) > 127
    return raw.view(dtype).view(shape)


def whole(tensor: Tensor) -> int:
    return int(digest(Part(tensor, tuple(tensor.shape)))) & MASK


def divided(tensor: Tensor, dim: int, cuts: list[int]) -> int:
    """The digests of parts, added up as readers of records do."""
    bounds = [0, *sorted(cuts), tensor.shape[dim]]
    total = 0
    for start, stop in itertools.pairwise(bounds):
        rows = tensor.narrow(dim, start, stop - start)
        cut = Cut(dim, start, None)  # type: ignore[arg-type]  # the mesh is for others
        total += int(digest(Part(rows, tuple(tensor.shape), cut)))
    return total & MASK


@given(shapes.filter(bool), st.sampled_from(DTYPES), st.data())
def test_it_does_not_matter_how_rows_are_divided(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = sample(shape, dtype)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = data.draw(st.lists(st.integers(0, shape[dim]), max_size=4))
    assert divided(tensor, dim, cuts) == whole(tensor)


@given(shapes, st.sampled_from([d for d in DTYPES if d is not torch.bool]), st.data())
def test_every_flipped_bit_is_seen(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = sample(shape, dtype)
    before = whole(tensor)
    raw = tensor.view(-1).view(torch.uint8)
    byte, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
    raw[byte] ^= 1 << bit
    assert whole(tensor) != before


@given(st.integers(2, 200), st.integers(0, 1 << 30))
def test_signs_do_not_cancel(numel: int, seed: int) -> None:
    """What a sum with another zero does to many elements at once."""
    generator = torch.Generator().manual_seed(seed)
    zeros = torch.zeros(numel)
    chosen = torch.rand(numel, generator=generator) < 0.5
    changed = torch.where(chosen, -zeros, zeros)
    assert (whole(changed) == whole(zeros)) == (not bool(chosen.any()))
    values = torch.rand(numel, generator=generator) + 1
    assert (whole(torch.where(chosen, -values, values)) == whole(values)) == (not chosen.any())


def test_places_shapes_and_dtypes_count() -> None:
    tensor = sample((6, 5), torch.float32)
    others = [tensor.flip(0), tensor.flip(1), tensor.view(5, 6), tensor.view(-1), tensor[None]]
    assert len({whole(t) for t in [tensor, *others, tensor.view(torch.int32)]}) == 7


def test_long_rows_go_in_pieces_and_layout_does_not_count() -> None:
    tensor = sample((70, 1000), torch.float32)
    assert whole(tensor.t().contiguous().t()) == whole(tensor)
    assert divided(tensor, 0, [1, 33, 69]) == whole(tensor) == divided(tensor, 1, [500])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing_adds_nothing(shape: tuple[int, ...]) -> None:
    assert whole(torch.zeros(shape)) == 0


@ranks(2)
def test_ranks_find_their_rows(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    tensor = sample((5, 3), torch.float32)
    for dim in (0, 1):
        part = part_of(distribute_tensor(tensor.clone(), mesh, [Shard(dim)]))
        assert part is not None
        total = digest(part)
        torch.distributed.all_reduce(total)
        assert int(total) & MASK == whole(tensor)
    copied = part_of(distribute_tensor(tensor.clone(), mesh, [Replicate()]))
    assert copied is not None
    assert copied.cut is None
