"""Time is arithmetic over the machine's figures: checked by hand; machines survive their file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polyshard_plan import PlanError, Settings, draft, parse_mesh
from polyshard_plan.estimate.machines import MACHINES, Link, load_machine, save_machine
from polyshard_plan.estimate.timing import link_of

pytestmark = pytest.mark.once

SLOW_LINK = replace(
    MACHINES["h100x8"],
    flops_per_second={"float32": 1e30, "bfloat16": 1e30},
    memory_bytes_per_second=1e30,
    operation_seconds=0.0,
    inside=Link(1e6, 0.0),
)
SLOW_COMPUTE = replace(
    SLOW_LINK,
    flops_per_second={"float32": 1e9, "bfloat16": 1e9},
    efficiency=0.5,
    inside=Link(1e30, 0.0),
)


def settings(tmp_path: Path, machine: object) -> Settings:
    path = tmp_path / "machine.json"
    save_machine(machine, path)  # type: ignore[arg-type]
    return Settings(
        model="plan_models:Pair",
        mesh=parse_mesh("dp=2"),
        sequence=4,
        inputs="plan_models:pair_inputs",
        machine=str(path),
    )


def test_on_a_slow_link_a_step_takes_its_bytes(tmp_path: Path) -> None:
    document = draft(settings(tmp_path, SLOW_LINK))
    assert document.timing is not None
    # Nothing overlaps with compute that takes no time, and transfers of one lane follow each other.
    # The reduction of the last unit runs while the first is gathered again.
    gathers = sum(t.sent_bytes for t in document.traffic if t.collective == "all-gather")
    reduces = sum(t.sent_bytes for t in document.traffic if t.collective == "reduce-scatter")
    assert document.timing.gather_seconds == pytest.approx(gathers / 1e6)
    assert document.timing.reduce_seconds == pytest.approx(reduces / 1e6)
    assert gathers / 1e6 < document.timing.step_seconds <= (gathers + reduces) / 1e6
    assert sum(s for _, s in document.timing.exposed) == pytest.approx(document.timing.step_seconds)


def test_on_a_fast_link_a_step_takes_its_products(tmp_path: Path) -> None:
    document = draft(settings(tmp_path, SLOW_COMPUTE))
    assert document.timing is not None
    # Forward: a product a layer. Backward: two, but for the input of the first layer.
    product = 2 * 4 * 8 * 8
    flops = 2 * product + 3 * product
    assert document.timing.step_seconds == pytest.approx(flops / (1e9 * 0.5), rel=1e-6)
    assert document.timing.compute_seconds == pytest.approx(flops / (1e9 * 0.5), rel=1e-6)


def test_machines_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for machine in MACHINES.values():
        save_machine(machine, path)
        assert load_machine(str(path)) == machine
    path.write_text("{}", "utf-8")
    with pytest.raises(PlanError, match="cannot be read"):
        load_machine(str(path))


def test_axes_that_leave_a_host_use_its_network() -> None:
    mesh = parse_mesh("replicate=2,dp=4,tp=2")
    machine = MACHINES["h100x8"]
    assert link_of("tp", mesh, machine) == machine.inside
    assert link_of("dp", mesh, machine) == machine.inside
    assert link_of("replicate", mesh, machine) == machine.between
