"""Begins find their ends, and spans of a track do not overlap."""

from __future__ import annotations

import itertools
import json

from trace_runs import overlaps

from polyshard_cli.trace.events import Kind, Span, micros
from polyshard_cli.trace.recording.spans import Spans


def recorder() -> tuple[Spans, list[Span]]:
    done: list[Span] = []
    ticks = itertools.count(step=1000)
    return Spans(lambda: next(ticks), done.append), done


def times(span: Span) -> tuple[str, int, int, int]:
    return span.name, span.begin_ns // 1000, span.end_ns // 1000, span.lane


def test_transfers_that_overlap_are_on_lanes_of_their_own() -> None:
    found, done = recorder()
    for name in ("a", "b"):
        found.begin(Kind.GATHER, name, {"bytes": 1})
    found.end(Kind.GATHER, "a", wait_us=0.5)
    found.begin(Kind.GATHER, "c", {})
    found.begin(Kind.GATHER, "d", {})
    for name in ("b", "d", "c"):
        found.end(Kind.GATHER, name)
    assert [times(s) for s in done] == [
        *(("a", 0, 2, 0), ("b", 1, 5, 1), ("d", 4, 6, 2), ("c", 3, 7, 0))
    ]
    assert done[0].args == {"bytes": 1, "wait_us": 0.5}
    assert not list(overlaps([json.loads(span.line(0)) for span in done]))


def test_calls_nest_and_a_unit_may_call_itself() -> None:
    found, done = recorder()
    for _ in range(2):
        found.begin(Kind.FORWARD, "a", {})
    for _ in range(2):
        found.end(Kind.FORWARD, "a")
    assert [times(s) for s in done] == [("a", 1, 2, 0), ("a", 0, 3, 0)]


def test_ends_without_begin_are_passed_over_and_begins_without_end_are_ended() -> None:
    found, done = recorder()
    found.end(Kind.REDUCE, "a")
    assert not done
    found.begin(Kind.FORWARD, "outer", {})
    found.begin(Kind.FORWARD, "inner", {})
    found.begin(Kind.REDUCE, "a", {"bytes": 3})
    found.end_all()
    assert [s.name for s in done] == ["a", "inner", "outer"]
    assert done[0].args == {"bytes": 3, "broken": True}
    found.end_all()
    found.end(Kind.REDUCE, "a")
    assert len(done) == 3
    found.begin(Kind.REDUCE, "a", {})  # its lane is free again
    found.end(Kind.REDUCE, "a")
    assert done[-1].lane == 0


def test_what_is_told_afterwards_ends_now() -> None:
    found, done = recorder()
    found.begin(Kind.GATHER, "early", {}, -7000)
    found.end(Kind.GATHER, "early")
    assert times(done.pop()) == ("early", -7, 0, 0)
    found.begin(Kind.STEP, "step", {})
    found.past(Kind.WAIT, "a", 1e-6, {})
    assert times(done[0]) == ("a", 1, 2, 0)


def test_a_long_uptime_loses_no_nanosecond() -> None:
    assert micros(10**17 + 1) == "100000000000000.001"
    assert micros(-1) == "-0.001"
    line = Span(Kind.STEP, 'a "name"', 10**16 + 7, 10**16 + 1010, 0, {"step": 1}).line(5)
    assert '"ts":10000000000000.007,"dur":1.003' in line
    assert json.loads(line)["name"] == 'a "name"'
