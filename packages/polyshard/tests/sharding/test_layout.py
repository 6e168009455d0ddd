"""The layout arithmetic against torch.chunk and against brute force."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from polyshard.program.packing import Packing
from polyshard.sharding.layout import (
    ALIGNMENT_BYTES,
    GroupLayout,
    ParameterLayout,
    ParameterShape,
    chunk_bounds,
    plan_layout,
)

worlds = st.integers(1, 9)
dims = st.integers(0, 7)


@st.composite
def shapes(draw: st.DrawFn) -> ParameterShape:
    shape = tuple(draw(st.lists(dims, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1)) if shape else None
    return ParameterShape("p", shape, dim)


groups = st.lists(shapes(), min_size=1, max_size=6)


def plan(members: list[ParameterShape], world: int, staging_bytes: int) -> GroupLayout:
    return plan_layout(members, world, 4, staging_bytes)


@given(st.integers(0, 50), worlds)
def test_bounds_are_those_of_torch_chunk(size: int, world: int) -> None:
    chunks = torch.arange(size).chunk(world)
    for rank in range(world):
        start, stop = chunk_bounds(size, world, rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start, stop)) == expected


def _alignment(placed: ParameterLayout) -> int:
    """16 bytes, or what a chunk of fewer (fp32) can be aligned to."""
    return {0: 1, 1: 4, 2: 8, 3: 8}.get(placed.chunk_numel, 16)


def test_small_chunks_travel_without_padding() -> None:
    """At 4096 ranks eight vectors of 4096 elements are eight elements a rank."""
    layout = plan([ParameterShape(str(i), (4096,)) for i in range(8)], 4096, 64 << 10)
    assert [p.shard_offset for p in layout.parameters] == list(range(8))
    assert layout.shard_numel == 8


@given(groups, worlds, st.sampled_from([0, 16, 64, 10_000]))
def test_chunks_and_regions_do_not_overlap(
    members: list[ParameterShape], world: int, staging_bytes: int
) -> None:
    layout = plan(members, world, staging_bytes)
    chunks = [
        (p.shard_offset, p.chunk_numel, _alignment(p) if p.staged else ALIGNMENT_BYTES)
        for p in layout.parameters
    ]
    regions = [(p.region_offset, p.region_numel, ALIGNMENT_BYTES) for p in layout.parameters]
    for spans, total in ((chunks, layout.shard_numel), (regions, layout.unsharded_numel)):
        end = 0
        for start, length, alignment in sorted(s for s in spans if s[1]):
            assert start >= end
            assert start * 4 % alignment == 0
            end = start + length
        assert end <= total
    assert layout.staged_offset * 4 % ALIGNMENT_BYTES == 0
    assert layout.shard_numel * 4 % 16 == 0


@given(groups, worlds, st.sampled_from([0, 64, 10_000]))
def test_every_element_is_held_once(
    members: list[ParameterShape], world: int, staging_bytes: int
) -> None:
    layout = plan(members, world, staging_bytes)
    for placed in layout.parameters:
        locals_ = [placed.local_numel(r) for r in range(world)]
        assert all(n <= placed.chunk_numel for n in locals_)
        assert sum(locals_) == placed.numel * (world if placed.dim is None else 1)


@given(groups, worlds)
def test_a_direct_region_starts_with_the_whole_parameter(
    members: list[ParameterShape], world: int
) -> None:
    layout = plan(members, world, staging_bytes=0)
    for index in layout.direct:
        placed = layout.parameters[index]
        full = torch.arange(placed.numel, dtype=torch.float32).view(placed.shape)
        if placed.dim is None or placed.dim != 0:
            assert world == 1
            continue
        region = torch.full((placed.region_numel,), -1.0)
        for rank in range(world):
            start, stop = placed.bounds(rank)
            local = full[start:stop].reshape(-1)
            offset = rank * placed.chunk_numel
            region[offset : offset + local.numel()] = local
        assert torch.equal(region[: placed.numel].view(placed.shape), full)


@given(groups, st.integers(2, 9), st.sampled_from([0, 64, 10_000]))
def test_staged_chunks_lie_together_at_the_end(
    members: list[ParameterShape], world: int, staging_bytes: int
) -> None:
    layout = plan(members, world, staging_bytes)
    for index, placed in enumerate(layout.parameters):
        assert placed.staged is (index in layout.staged)
        assert (placed.shard_offset >= layout.staged_offset) is placed.staged or not placed.numel
        if placed.dim != 0:
            assert placed.staged


def test_a_world_of_one_stages_nothing() -> None:
    members = [ParameterShape("a", (), None), ParameterShape("b", (3, 4), 1)]
    layout = plan(members, 1, staging_bytes=10_000)
    assert layout.staged == ()
    for placed in layout.parameters:
        assert placed.shard_offset == placed.region_offset


@given(groups, worlds, st.booleans())
def test_packed_gradients_are_the_chunks_of_each(
    members: list[ParameterShape], world: int, is_whole: bool
) -> None:
    layout = plan(members, world, staging_bytes=1 << 20)
    sources = {i: torch.rand(p.shape) for i, p in enumerate(layout.parameters)}
    if not is_whole:
        sources.pop(0)
    pieces, scratch = Packing(layout, 0, None).pieces(sources, torch.float32)
    if scratch is None:
        return
    assert pieces[-1] is not None
    packed = pieces[-1].view(world, layout.staged_numel)
    for rank in range(world):
        row = torch.zeros(layout.staged_numel)
        for index in set(layout.staged).intersection(sources):
            placed, part = layout.parameters[index], sources[index]
            if placed.dim is not None:
                start, stop = placed.bounds(rank)
                part = part.narrow(placed.dim, start, stop - start)
            begin = placed.shard_offset - layout.staged_offset
            row[begin : begin + part.numel()] = part.flatten()
        assert torch.equal(packed[rank], row)
