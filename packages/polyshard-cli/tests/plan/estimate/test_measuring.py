"""``--measure``: figures of this machine that a plan can use."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from polyshard_cli.plan import Settings, draft, parse_mesh
from polyshard_cli.plan.estimate.machines import load_machine, save_machine
from polyshard_cli.plan.estimate.measuring import measure


@pytest.mark.thorough
def test_this_machine_is_measured_and_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    machine = measure(2)
    save_machine(machine, path)
    assert load_machine(str(path)) == machine
    # Bounds that any machine keeps: nothing is faster than these, nor as slow.
    assert all(1e7 < rate < 1e16 for rate in machine.flops_per_second.values())
    assert 1e7 < machine.memory_bytes_per_second < 1e14
    assert 1e5 < machine.inside.bytes_per_second < 1e13
    assert 1e-8 < machine.operation_seconds < 1
    assert 0.0 <= machine.overlap <= 1.0
    assert 1e7 < machine.optimizer_bytes_per_second < 1e14
    if find_spec("polyshard_quantized") is None:
        assert machine.codec_bytes_per_second == 0
    assert 0.0 <= machine.transfer_seconds < 1
    assert 0.0 < machine.collective_seconds < 1
    for roof in machine.products.values():
        intensities = [intensity for intensity, _ in roof.points]
        assert intensities == sorted(intensities)
    document = draft(Settings(model="demo:tiny", mesh=parse_mesh("dp=2"), machine=str(path)))
    assert document.machine.name == machine.name
    assert document.timing is not None
    assert document.timing.step_seconds > 0
