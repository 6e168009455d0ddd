"""What plugins add to a step's time, by hand: bytes over the machine's figures."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from polyshard_cli.plan import Settings, draft, parse_mesh
from polyshard_cli.plan.drafting import planned, subject_of
from polyshard_cli.plan.dry_run.probing import Cost, Probe
from polyshard_cli.plan.estimate.machines import MACHINES, Machine, save_machine
from polyshard_cli.plan.estimate.memory import Memory
from polyshard_cli.plan.estimate.timing import Span, Step, Timing, with_overheads

MACHINE = replace(
    MACHINES["h100x8"], host_bytes_per_second=1e3, memory_bytes_per_second=1e30, overlap=0.0
)
TIMING = Timing(
    step_seconds=1.0,
    compute_seconds=0.5,
    optimizer_seconds=0.1,
    gather_seconds=0.2,
    reduce_seconds=0.2,
    exposed=(("last reductions", 0.4),),
    spans=(Span("compute", "", "forward", 0.0, 0.5), Span("compute", "", "optimizer", 0.9, 1.0)),
)
PAIR = Settings(
    model="plan_models:Pair",
    mesh=parse_mesh("dp=2"),
    inputs="plan_models:pair_inputs",
    sequence=4,
)
SHARDS = 2 * (8 * 8 + 8) * 4 // 2
"""Bytes of one rank's shards: two layers of 8 x 8 with a bias, fp32, on two ranks."""


def added(machine: Machine = MACHINE, passes: int = 1, **tiers: object) -> Timing:
    resting = {"params": "device", "grads": "device", "optimizer": "device", "fraction": 1.0}
    groups = planned(subject_of(PAIR), PAIR)
    step = Step(groups, Probe({}, Cost()), machine, PAIR.mesh, passes, (), Memory(()))
    return with_overheads(TIMING, step, resting | tiers, "adamw")


def test_nothing_is_added_where_all_rests_on_the_device() -> None:
    assert added() == TIMING


def test_state_on_the_host_comes_and_goes() -> None:
    """Two states of each element, in both directions at once."""
    found = added(optimizer="host", fraction=0.5)
    passing = 2 * SHARDS * 0.5 / 1e3
    assert found.optimizer_seconds == pytest.approx(0.1 + passing)
    assert found.step_seconds == pytest.approx(1.0 + passing)
    hidden = added(replace(MACHINE, overlap=1.0), optimizer="host", fraction=0.5)
    assert hidden.optimizer_seconds == pytest.approx(0.1 + passing - 0.1)


def test_shards_on_the_host_come_for_each_gather() -> None:
    found = added(params="host", grads="host", optimizer="host")
    # Each unit is gathered in forward and again in backward; its gradients leave once.
    staged = 3 * SHARDS / 1e3
    # AdamW on the host: parameters, gradients and two states are read, all but gradients written.
    stepping = 7 * SHARDS / 1e3
    assert found.optimizer_seconds == pytest.approx(stepping)
    assert found.step_seconds == pytest.approx(1.0 - 0.1 + stepping + staged)
    assert dict(found.exposed)["shards from and to other tiers"] == pytest.approx(staged)
    *_, optimizer, plugins = found.spans
    assert (optimizer.phase, plugins.phase) == ("optimizer", "plugins")
    assert optimizer.start == pytest.approx(0.9)
    assert optimizer.end == plugins.start == pytest.approx(0.9 + stepping)
    assert plugins.end == pytest.approx(found.step_seconds)
    twice = added(passes=2, params="host", grads="host", optimizer="host")
    both = dict(twice.exposed)["shards from and to other tiers"]
    assert both == pytest.approx(staged + 2 * SHARDS / 1e3)


def test_where_the_host_is_the_device_all_of_it_is_copied() -> None:
    host = replace(MACHINE, is_ahead=False)
    found = added(host, optimizer="host")
    assert found.optimizer_seconds == pytest.approx(0.1 + 2 * 2 * SHARDS / 1e3)
    assert added(host, params="host", grads="host", optimizer="host").optimizer_seconds == 0.1


@pytest.mark.skipif(find_spec("polyshard_quantized") is None, reason="needs polyshard-quantized")
def test_codes_are_made_and_read(tmp_path: Path) -> None:
    settings = Settings(model="demo:tiny", mesh=parse_mesh("dp=2"), quantize="int8")
    timing, plain = draft(settings).timing, draft(replace(settings, quantize="")).timing
    assert timing is not None
    assert plain is not None
    coded = dict(timing.exposed)["encoding and decoding"]
    assert coded > 0
    assert "encoding and decoding" not in dict(plain.exposed)
    assert max(span.end for span in timing.spans) == pytest.approx(timing.step_seconds)
    path = tmp_path / "machine.json"
    rate = MACHINES["h100x8"].memory_bytes_per_second / 2
    save_machine(replace(MACHINES["h100x8"], codec_bytes_per_second=rate), path)
    slower = draft(replace(settings, machine=str(path))).timing
    assert slower is not None
    assert dict(slower.exposed)["encoding and decoding"] == pytest.approx(2 * coded)
