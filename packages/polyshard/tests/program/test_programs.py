"""Waits of programs: derived from memory alone, enough, and none too many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from toy_codecs import Codecs
from toy_steps import STEPS, WORLD

from polyshard import Plugin, describe, fully_shard, hookimpl
from polyshard.errors import PlanMismatchError
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import GroupInfo, StorageFactory
from polyshard.program import executor, ops
from polyshard.program.executor import LaneFrame
from polyshard.program.ops import ENTRY, Frame, Lane, Memory, Op, with_waits
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import ranks
from polyshard_testing.streams import Recorder, recorded

MEMORY = (Memory.SHARD, Memory.UNSHARDED, Memory.TOTAL)


@st.composite
def programs(draw: Callable[[Any], Any]) -> list[Op]:
    """Operations on any lanes, the last of which joins them all."""
    some = st.lists(st.sampled_from(MEMORY), max_size=2, unique=True).map(tuple)
    lanes = st.sampled_from(list(Lane))
    made = [
        Op(f"op {place}", lambda _: None, draw(lanes), draw(some), draw(some))
        for place in range(draw(st.integers(1, 7)))
    ]
    used = tuple({memory for op in made for memory in (*op.reads, *op.writes)})
    idle = [op for op in made if op.lane is not Lane.COMPUTE and not (op.reads or op.writes)]
    kept = [op for op in made if op not in idle]
    return [*kept, Op("end", lambda _: None, writes=used)]


def happens_before(found: Sequence[Op], left_out: tuple[int, int] | None = None) -> Any:
    """Whether one place surely comes before another, by lanes and waits alone."""

    @cache
    def before(earlier: int, later: int) -> bool:
        if earlier == later:
            return True
        if later == ENTRY:
            return False
        op = found[later]
        lane = [p for p in range(later) if found[p].lane is op.lane]
        steps = [w for w in op.waits if (w, later) != left_out]
        if lane:
            steps.append(lane[-1])
        elif op.lane is Lane.COMPUTE:
            steps.append(ENTRY)
        return any(before(earlier, step) for step in steps)

    return before


def conflicts(found: Sequence[Op]) -> Iterator[tuple[int, int]]:
    """Pairs of which one writes what the other uses; memory comes from before the first one."""
    for later, op in enumerate(found):
        if op.reads or op.writes:
            yield ENTRY, later
        for earlier, other in enumerate(found[:later]):
            written = set(op.writes) & {*other.reads, *other.writes}
            if written or set(op.reads) & set(other.writes):
                yield earlier, later


@given(programs())
def test_what_conflicts_is_ordered(made: list[Op]) -> None:
    found = with_waits(made)
    before = happens_before(found)
    assert all(before(*pair) for pair in conflicts(found))


@given(programs())
def test_no_wait_is_for_nothing(made: list[Op]) -> None:
    found = with_waits(made)
    for later, op in enumerate(found):
        for earlier in op.waits:
            before = happens_before(found, (earlier, later))
            assert not all(before(*pair) for pair in conflicts(found)), (earlier, later)


@given(programs())
def test_only_what_is_waited_for_is_marked(made: list[Op]) -> None:
    found = with_waits(made)
    waited = {earlier for op in found for earlier in op.waits}
    assert {place for place, op in enumerate(found) if op.marks} == waited - {ENTRY}


def test_a_lane_that_nothing_joins_is_refused() -> None:
    """The memory of such a run could go back while the lane uses it."""
    with pytest.raises(AssertionError, match="gather is never joined"):
        with_waits([Op("gather", lambda _: None, Lane.GATHER, writes=(Memory.UNSHARDED,))])


# Recorded steps -------------------------------------------------------------------------------

Edge = tuple[str, str]
"""What waits for what, by names: ``reduce: scatter`` and ``pack``."""


def edges_of(name: str, found: Sequence[Op]) -> Iterator[tuple[Edge, int, int]]:
    for later, op in enumerate(found):
        for earlier in op.waits:
            what = "entry" if earlier == ENTRY else found[earlier].name
            yield (f"{name}: {op.name}", what), later, earlier


@contextmanager
def without(dropped: Edge | None, seen: set[Edge]) -> Iterator[None]:
    """Programs are compiled without one edge; those that were found are added to ``seen``."""
    derive, make = ops.with_waits, ops.compiled
    names: list[str] = []

    def compiled(name: str, *args: Any, **keywords: Any) -> Any:
        names.append(name)
        return make(name, *args, **keywords)

    def derived(made: Sequence[Op]) -> tuple[Op, ...]:
        found = list(derive(made))
        for edge, later, earlier in edges_of(names[-1], found):
            seen.add(edge)
            if edge == dropped:
                waits = tuple(w for w in found[later].waits if w != earlier)
                found[later] = replace(found[later], waits=waits)
        return tuple(found)

    with (
        mock.patch.object(ops, "with_waits", derived),
        mock.patch("polyshard.program.unshard.compiled", compiled),
        mock.patch("polyshard.program.reduce.compiled", compiled),
    ):
        yield


def races_without(
    run: Callable[[Recorder], None], dropped: Edge | None, seen: set[Edge]
) -> list[str]:
    with without(dropped, seen), recorded(WORLD) as recorder:
        run(recorder)
        return [str(race) for race in recorder.races]


@pytest.fixture(scope="module")
def edges() -> dict[Edge, list[Callable[[Recorder], None]]]:
    """Every edge of the programs of all steps, with the steps that have it."""
    found: dict[Edge, list[Callable[[Recorder], None]]] = {}
    for run in STEPS:
        seen: set[Edge] = set()
        assert races_without(run, None, seen) == []
        for edge in seen:
            found.setdefault(edge, []).append(run)
    return found


def test_every_edge_orders_something(edges: dict[Edge, list[Callable[[Recorder], None]]]) -> None:
    """Without any one of them some step uses memory too early, or gives it back too early."""
    assert len(edges) >= 6
    idle = [
        edge
        for edge, runs in sorted(edges.items())
        if not any(races_without(run, edge, set()) for run in runs)
    ]
    assert idle == []


def test_operations_use_what_they_declare() -> None:
    """Two operations of a run that touch the same bytes, one writing, declare the same memory."""
    undeclared: set[tuple[str, str]] = set()
    for run in STEPS:
        with recorded(WORLD) as recorder, _watched(recorder, undeclared):
            run(recorder)
    assert undeclared == set()


@contextmanager
def _watched(recorder: Recorder, undeclared: set[tuple[str, str]]) -> Iterator[None]:
    """Note every use of memory within an operation, and compare it with earlier ones of its run."""
    uses: dict[int, list[tuple[Op, Any]]] = {}
    here: list[tuple[Frame, Op]] = []
    use, run_on_lane = recorder.ledger.use, executor._run_on_lane

    def note(used: Any) -> None:
        if here:
            frame, op = here[-1]
            for other, earlier in uses.setdefault(id(frame), []):
                overlaps = earlier.start < used.stop and used.start < earlier.stop
                is_conflict = other is not op and overlaps and (earlier.writes or used.writes)
                if is_conflict and not _declared(other, op):
                    undeclared.add((other.name, op.name))
            uses[id(frame)].append((op, used))
        use(used)

    def run(frame: LaneFrame, place: int) -> object:
        here.append((frame, frame.program.ops[place]))
        kept.append(frame)  # so that ids are not used again
        try:
            return run_on_lane(frame, place)
        finally:
            here.pop()

    kept: list[Frame] = []
    with (
        mock.patch.object(recorder.ledger, "use", note),
        mock.patch.object(executor, "_run_on_lane", run),
    ):
        yield


def _declared(one: Op, other: Op) -> bool:
    written = set(one.writes) & {*other.reads, *other.writes}
    return bool(written or set(other.writes) & set(one.reads))


# What is shown -------------------------------------------------------------------------------


@ranks(2)
def test_describe_shows_what_a_group_uses_and_nothing_else(rank: int, size: int) -> None:
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in plain:
        fully_shard(layer)
    text = str(describe(fully_shard(plain), programs=True))
    assert text.count("unshard:") == text.count("reduce:") == 1, "both groups run the same"
    assert "programs of 0, 1" in text
    assert "encode" not in text
    assert "replicas" not in text
    coded = str(describe(fully_shard(nn.Linear(6, 6), plugins=[Codecs()]), programs=True))
    for name in ("encode", "exchange", "decode", "keep"):
        assert f"\n  {name}" in coded, coded
    assert "programs of" not in str(describe(plain))


@ranks(2)
def test_ranks_compare_their_programs(rank: int, size: int) -> None:
    """Storages that differ where no other line of a plan says so."""
    model: Any = fully_shard(nn.Linear(6, 6), plugins=[Kept(holds=rank == 1)])
    with pytest.raises(PlanMismatchError, match="take held"):
        model(torch.ones(1, 6))


class Kept(Plugin, StorageFactory):
    name, settings = "kept", ""

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds

    def bind(self, group: GroupInfo, layout: GroupLayout) -> DeviceStorage:
        storage = DeviceStorage()
        storage.holds_gradients = self._holds
        return storage

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> Kept:
        return self
