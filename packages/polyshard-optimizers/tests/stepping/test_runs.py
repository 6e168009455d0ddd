"""Runs cover every element once, padding never, and join what may be joined."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from polyshard.sharding.layout import ParameterShape, plan_layout
from polyshard_optimizers.stepping.runs import Stretch, cut, find_runs, follow_each_other

ITEMSIZE = 4
shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@given(
    shapes=st.lists(shapes, min_size=1, max_size=8),
    world_size=st.integers(1, 5),
    staging_bytes=st.sampled_from([0, 64, 1 << 20]),
    data=st.data(),
)
def test_runs_cover_each_element_once_and_no_padding(
    shapes: list[tuple[int, ...]], world_size: int, staging_bytes: int, data: st.DataObject
) -> None:
    every = [ParameterShape(str(i), shape) for i, shape in enumerate(shapes)]
    layout = plan_layout(every, world_size, ITEMSIZE, staging_bytes)
    rank = data.draw(st.integers(0, world_size - 1))
    filled = [p for p in layout.parameters if p.local_numel(rank)]
    moved = data.draw(st.integers(-10, 10)) * ITEMSIZE
    stretches = [
        Stretch(
            ITEMSIZE * p.shard_offset,
            ITEMSIZE * p.shard_offset + moved,
            ITEMSIZE * p.local_numel(rank),
        )
        for p in filled
    ]
    runs = find_runs(stretches)
    assert sorted(i for run in runs for i in run) == list(range(len(filled)))
    covered = set[int]()
    for run in runs:
        first, last = stretches[run[0]], stretches[run[-1]]
        elements = range(first.weight // ITEMSIZE, (last.weight + last.nbytes) // ITEMSIZE)
        assert len(elements) == sum(filled[i].local_numel(rank) for i in run), "no padding"
        assert covered.isdisjoint(elements)
        covered.update(elements)
    for one, other in itertools.pairwise(runs):
        end = stretches[one[-1]].weight + stretches[one[-1]].nbytes
        assert end != stretches[other[0]].weight, "as long as they can be"


def test_gradients_have_to_follow_each_other_too() -> None:
    together = [Stretch(0, 1000, 8), Stretch(8, 1008, 8), Stretch(16, 2000, 8)]
    assert find_runs(together) == [[0, 1], [2]]
    assert find_runs(together[::-1]) == [[2, 1], [0]]


@given(st.lists(st.integers(1, 40), min_size=1), st.sampled_from([1, 4, 16]))
def test_odd_ends_end_a_run(sizes: list[int], unit_bytes: int) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    stretches = [Stretch(s, s, n) for s, n in zip(starts, sizes, strict=True)]
    for run in find_runs(stretches, unit_bytes):
        begins = [starts[i] - starts[run[0]] for i in run]
        assert all(begin % unit_bytes == 0 for begin in begins)


def test_following() -> None:
    assert follow_each_other([(0, 4), (4, 2), (6, 1)])
    assert not follow_each_other([(0, 4), (5, 2)])
    assert not follow_each_other([(4, 2), (0, 4)])


@given(st.integers(0, 1000), st.integers(1, 300))
def test_cuts(numel: int, most: int) -> None:
    ranges = cut(numel, most)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(numel))
    assert max(stop - start for start, stop in ranges) <= most
    assert len(ranges) == max(1, math.ceil(numel / most))
