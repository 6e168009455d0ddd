"""Ranks whose clocks were set wrong by hand come out in one clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from trace_runs import events_of, spans, traced

from polyshard_cli.trace import merge, summarize
from polyshard_testing import World

AHEAD_NS = (0, 5_000_000_000_123, -700_000_000)
FASTER = (0.0, 2e-4, -1e-4)


def wrong_clock(rank: int, start_ns: int) -> int:
    """What this rank's clock shows; those of all ranks are one clock in truth."""
    now = time.perf_counter_ns()
    return now + AHEAD_NS[rank] + round(FASTER[rank] * (now - start_ns))


def run(rank: int, size: int, folder: str, start_ns: int) -> None:
    traced(folder, rank, clock=lambda: wrong_clock(rank, start_ns))


def check(world: World, folder: Path) -> None:
    start_ns = time.perf_counter_ns()
    world.run(run, str(folder), start_ns)
    merged = merge(folder, folder / "trace.json")
    assert merged.missing == ()
    unsure = [one.uncertainty_us for one in merged.ranks]
    for one in merged.ranks:
        assert one.uncertainty_us is not None
        # Drift until the first comparison is part of the offset.
        grown = abs(FASTER[one.rank]) * (time.perf_counter_ns() - start_ns) / 1e3
        wrong = abs(one.offset_us + AHEAD_NS[one.rank] / 1e3)
        assert wrong <= one.uncertainty_us + grown
    events = events_of(folder / "trace.json")
    assert sorted({e["pid"] for e in events}) == list(range(world.size))
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(names) == world.size
    for kind in ("gather", "reduce"):
        check_order(spans(events, kind), world.size, 2 * max(u or 0.0 for u in unsure))


def check_order(events: list[dict[str, Any]], size: int, slack_us: float) -> None:
    """A collective ends on no rank before it has begun on all."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for rank in range(size):
        seen: dict[str, int] = {}
        for event in sorted((e for e in events if e["pid"] == rank), key=lambda e: e["ts"]):
            count = seen[event["name"]] = seen.get(event["name"], 0) + 1
            begin, end = event["ts"], event["ts"] + event["dur"]
            found.setdefault((event["name"], count), []).append((begin, end))
    assert found
    for times in found.values():
        assert len(times) == size
        assert min(end for _, end in times) >= max(begin for begin, _ in times) - slack_us


def test_two_ranks(world2: World, tmp_path: Path) -> None:
    check(world2, tmp_path)
    found = summarize(tmp_path)
    assert (found.ranks, found.steps) == (2, 3)
    calls = {(row.name, row.kind): row.calls for row in found.rows}
    assert calls["0", "gather"] == 2 * 3 * 2
    assert calls["SGD", "optimizer"] == 2 * 3


@pytest.mark.thorough
def test_three_ranks(world3: World, tmp_path: Path) -> None:
    check(world3, tmp_path)
