"""The record of a step: lanes that add up to the times that are said."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from polyshard_cli.plan import Settings, draft, parse_mesh
from polyshard_cli.plan.estimate.machines import MACHINES, Link, save_machine
from polyshard_cli.plan.estimate.timing import LANES, Span, Timing, _Links

BALANCED = replace(
    MACHINES["h100x8"],
    flops_per_second={"float32": 1e9, "bfloat16": 1e9},
    memory_bytes_per_second=1e30,
    operation_seconds=0.0,
    efficiency=0.5,
    inside=Link(1e8, 0.0),
    protocols=(),
)
"""Neither compute nor transfers take all of the time."""


def timing(tmp_path: Path, model: str, overlap: float = 1.0) -> Timing:
    path = tmp_path / "machine.json"
    save_machine(replace(BALANCED, overlap=overlap, memory_bytes_per_second=1e10), path)
    mesh = parse_mesh("replicate=2,dp=2")
    found = draft(Settings(model=model, mesh=mesh, machine=str(path), sequence=16)).timing
    assert found is not None
    return found


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("model", ["demo:tiny", "plan_models:frozen"])
def test_lanes_add_up(tmp_path: Path, model: str, overlap: float) -> None:
    found = timing(tmp_path, model, overlap)
    lanes = {lane: [s for s in found.spans if s.lane == lane] for lane in LANES}
    for lane, spans in lanes.items():
        for before, after in pairwise(spans):
            follows = before.end <= after.start + 1e-12
            assert before.start < before.end
            assert follows or lane == "reductions"  # over two axes
    lengths = {lane: sum(s.end - s.start for s in spans) for lane, spans in lanes.items()}
    computing = found.compute_seconds + found.optimizer_seconds
    if overlap == 1.0:  # nothing is held up by anything
        assert lengths["compute"] == pytest.approx(computing)
        assert lengths["gathers"] == pytest.approx(found.gather_seconds)
        assert lengths["reductions"] == pytest.approx(found.reduce_seconds)
    else:
        assert lengths["compute"] > computing
        assert lengths["gathers"] + lengths["reductions"] > (
            found.gather_seconds + found.reduce_seconds
        )
    waits = sum(seconds for _, seconds in found.exposed)
    slowed = dict(found.exposed).get("transfers that take from compute", 0.0)
    assert lengths["compute"] + waits - slowed == pytest.approx(found.step_seconds)
    assert max(span.end for span in found.spans) == pytest.approx(found.step_seconds)


def test_a_unit_computes_when_it_is_gathered_and_then_reduces(tmp_path: Path) -> None:
    spans = timing(tmp_path, "demo:tiny").spans
    units = [s.unit for s in spans if (s.lane, s.phase) == ("compute", "forward")]
    assert units == ["blocks.0", "blocks.1", ""]
    for unit in units:
        for phase in ("forward", "backward"):
            (compute,) = some(spans, "compute", unit, phase)
            for gather in some(spans, "gathers", unit, phase):
                assert gather.end <= compute.start + 1e-12
        shards, replicas = some(spans, "reductions", unit, "backward")
        assert compute.end - 1e-12 <= shards.start < shards.end <= replicas.start
    (optimizer,) = some(spans, "compute", "", "optimizer")
    assert optimizer.start >= max(s.end for s in spans if s is not optimizer) - 1e-12


def some(spans: tuple[Span, ...], lane: str, unit: str, phase: str) -> list[Span]:
    return [s for s in spans if (s.lane, s.unit, s.phase) == (lane, unit, phase)]


def test_what_is_held_up_holds_up_what_waits_for_it() -> None:
    """A second of compute beside a gather and a reduction of one link, and a sum over replicas."""
    links = _Links()
    (gather,) = links.start("gathers", "b", "backward", 0.0, {"dp": 0.5})
    shards, replicas = links.start("reductions", "a", "backward", 0.25, {"dp": 1.0, "rep": 0.25})
    assert (shards.start, shards.end, replicas.start) == (0.5, 1.5, 1.5)
    assert links.hold_up(0.0, 1.0, share=0.5) == 0.5  # half of one second, in which one of them ran
    assert (gather.end, shards.start, shards.end) == (0.75, 0.75, 2.0)
    assert (replicas.start, replicas.end) == (2.0, 2.25)
    (beside,) = links.start("gathers", "c", "backward", 2.0, {"dp": 0.125})
    assert beside.start == 2.0  # replicas have links of their own
    more, sums = links.start("reductions", "d", "backward", 2.0, {"dp": 0.5, "rep": 0.25})
    assert (more.start, sums.start) == (2.125, 2.625)
