"""Time is arithmetic over the machine's figures: checked by hand; machines survive their file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polyshard_cli.plan import Document, PlanError, Settings, draft, parse_mesh
from polyshard_cli.plan.dry_run.probing import Kernel
from polyshard_cli.plan.estimate.machines import MACHINES, Link, Roof, load_machine, save_machine
from polyshard_cli.plan.estimate.timing import SLOWED, link_of, seconds_of, seconds_of_transfer
from polyshard_cli.plan.estimate.traffic import Transfer

SLOW_LINK = replace(
    MACHINES["h100x8"],
    flops_per_second={"float32": 1e30, "bfloat16": 1e30},
    memory_bytes_per_second=1e30,
    operation_seconds=0.0,
    inside=Link(1e6, 0.0),
    protocols=(),
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
    # Nothing overlaps with compute that takes no time, and gathers and reductions share the link.
    gathers = sum(t.sent_bytes for t in document.traffic if t.collective == "all-gather")
    reduces = sum(t.sent_bytes for t in document.traffic if t.collective == "reduce-scatter")
    assert document.timing.gather_seconds == pytest.approx(gathers / 1e6)
    assert document.timing.reduce_seconds == pytest.approx(reduces / 1e6)
    assert document.timing.step_seconds == pytest.approx((gathers + reduces) / 1e6)
    assert sum(s for _, s in document.timing.exposed) == pytest.approx(document.timing.step_seconds)


def test_micro_batches_gather_each_time_and_reduce_once(tmp_path: Path) -> None:
    once = settings(tmp_path, SLOW_LINK)
    one, three = (draft(replace(once, accumulate=n, batch=2 * n)).timing for n in (1, 3))
    assert one is not None
    assert three is not None
    assert three.gather_seconds == pytest.approx(3 * one.gather_seconds)
    assert three.reduce_seconds == pytest.approx(one.reduce_seconds)
    late = [span for span in three.spans if span.lane == "reductions"]
    assert min(span.start for span in late) > 2 * one.gather_seconds
    # Two more forwards and backwards that wait for their gathers, and for no reduction.
    assert three.step_seconds - one.step_seconds == pytest.approx(2 * one.gather_seconds)


def test_what_is_accumulated_is_read_and_written(tmp_path: Path) -> None:
    machine = replace(SLOW_COMPUTE, flops_per_second={"float32": 1e30}, memory_bytes_per_second=1e6)
    once = settings(tmp_path, machine)
    one, two = (draft(replace(once, accumulate=n, batch=2 * n)).timing for n in (1, 2))
    assert one is not None
    assert two is not None
    gradients = 2 * 4 * (8 * 8 + 8)  # of two layers, unsharded
    longer = two.step_seconds - one.step_seconds
    by_hand = one.compute_seconds + 3 * gradients / 1e6
    assert longer == pytest.approx(by_hand, abs=one.reduce_seconds)


def test_what_is_packed_or_cast_is_copied(tmp_path: Path) -> None:
    """Columns come packed and are brought home; shards are cast before they leave."""
    once = settings(tmp_path, replace(SLOW_LINK, memory_bytes_per_second=1e6, inside=Link(1e30, 0)))
    small, narrow = (draft(replace(once, bf16=bf16)).timing for bf16 in (False, True))
    assert small is not None
    assert narrow is not None
    elements = 2 * (8 * 8 + 8)  # too few for transfers of their own: all are packed
    assert small.gather_seconds == pytest.approx(2 * 2 * 4 * elements / 1e6)
    summed = 3 * 4 * elements / 2  # two are read and one is written
    assert small.reduce_seconds == pytest.approx((2 * 4 * elements + summed) / 1e6)
    cast = 2 * (4 + 2) * elements / 2
    assert narrow.gather_seconds == pytest.approx((cast + 2 * 2 * 2 * elements) / 1e6)

    large = replace(once, model="plan_models:wide_layer", inputs="plan_models:wide_inputs")
    placements = ("", "plan_models:columns")
    rows, columns = (draft(replace(large, placement=where)).timing for where in placements)
    assert rows is not None
    assert columns is not None
    matrix = 4 * 1024 * 1024  # of the root, which is gathered once
    assert columns.gather_seconds - rows.gather_seconds == pytest.approx(2 * matrix / 1e6)
    assert columns.reduce_seconds - rows.reduce_seconds == pytest.approx(2 * matrix / 1e6)


def test_on_a_fast_link_a_step_takes_its_products(tmp_path: Path) -> None:
    document = draft(settings(tmp_path, SLOW_COMPUTE))
    assert document.timing is not None
    # Forward: a product a layer. Backward: two, but for the input of the first layer.
    product = 2 * 4 * 8 * 8
    flops = 2 * product + 3 * product
    assert document.timing.step_seconds == pytest.approx(flops / (1e9 * 0.5), rel=1e-6)
    assert document.timing.compute_seconds == pytest.approx(flops / (1e9 * 0.5), rel=1e-6)


def test_cores_that_do_both_take_the_sum(tmp_path: Path) -> None:
    """Nothing is free beside compute: a step takes its products and its bytes."""
    both = replace(SLOW_COMPUTE, inside=Link(1e6, 0.0), overlap=0.0)
    document = draft(settings(tmp_path, both))
    timing = document.timing
    assert timing is not None
    moving = timing.gather_seconds + timing.reduce_seconds
    assert timing.step_seconds == pytest.approx(timing.compute_seconds + moving)
    free = draft(settings(tmp_path, replace(both, overlap=1.0))).timing
    half = draft(settings(tmp_path, replace(both, overlap=0.5))).timing
    assert free is not None
    assert half is not None
    assert free.step_seconds < half.step_seconds < timing.step_seconds
    assert SLOWED in dict(half.exposed)
    assert SLOWED not in dict(free.exposed)


def test_kernels_are_launched_ahead_or_in_turn(tmp_path: Path) -> None:
    """Products of four seconds, and half a second of launching."""
    launched = draft(settings(tmp_path, replace(SLOW_LINK, operation_seconds=1.0))).timing
    assert launched is not None
    machine = replace(
        SLOW_COMPUTE,
        flops_per_second={"float32": 5 * 2 * 4 * 8 * 8 / (0.5 * 4.0)},
        operation_seconds=0.5 / round(launched.compute_seconds),
    )
    ahead = draft(settings(tmp_path, machine)).timing
    in_turn = draft(settings(tmp_path, replace(machine, is_ahead=False))).timing
    assert ahead is not None
    assert in_turn is not None
    assert in_turn.compute_seconds == pytest.approx(4.5, rel=1e-6)
    # What has no products, such as the loss, takes as long as it is launched.
    assert 4.0 <= ahead.compute_seconds < 4.5


def test_products_reach_what_was_measured_at_their_intensity() -> None:
    roof = Roof(((1.0, 10e9), (4.0, 40e9), (100.0, 50e9)))
    assert roof.flops_per_second(0.5) == pytest.approx(5e9)  # memory's speed
    assert roof.flops_per_second(2.0) == pytest.approx(20e9)
    assert roof.flops_per_second(20.0) == pytest.approx((40e9 * 50e9) ** 0.5)  # half of the way
    assert roof.flops_per_second(1e6) == 50e9
    machine = replace(SLOW_COMPUTE, products={"float32": roof})
    assert seconds_of(Kernel(200, 100), "float32", machine) == pytest.approx(200 / 20e9)
    assert seconds_of(Kernel(200, 100), "bfloat16", machine) == pytest.approx(200 / (1e9 * 0.5))
    slow = replace(machine, memory_bytes_per_second=10.0)
    assert seconds_of(Kernel(200, 100), "bfloat16", slow) == pytest.approx(10.0)
    assert seconds_of(Kernel(0, 100), "float32", slow) == pytest.approx(10.0)


def test_a_transfer_costs_something_beside_its_bytes(tmp_path: Path) -> None:
    """What the engine was found to take for one; the link's latency where it was not measured."""
    slow = replace(SLOW_LINK, inside=Link(1e30, 5.0))
    document = draft(settings(tmp_path, slow))
    calls = sum(t.calls for t in document.traffic if t.collective == "all-gather")
    assert calls
    assert document.timing is not None
    assert document.timing.gather_seconds == pytest.approx(5.0 * calls)
    tried = draft(settings(tmp_path, replace(slow, transfer_seconds=2.0))).timing
    assert tried is not None
    assert tried.gather_seconds == pytest.approx(2.0 * calls)


def test_the_optimizer_is_as_fast_as_it_was_found_to_be(tmp_path: Path) -> None:
    machine = replace(SLOW_COMPUTE, optimizer_bytes_per_second=1e6)
    document = draft(settings(tmp_path, machine))
    assert document.timing is not None
    # AdamW reads parameters, gradients and two states, and writes all but the gradients.
    elements = 2 * (8 * 8 + 8) // 2
    assert document.timing.optimizer_seconds == pytest.approx(7 * 4 * elements / 1e6)


def test_machines_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    roof = Roof(((1.0, 10e9), (4.0, 40e9)))
    measured = replace(SLOW_LINK, products={"float32": roof}, is_ahead=False, overlap=0.25)
    for machine in (*MACHINES.values(), measured):
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


@pytest.mark.parametrize(
    ("text", "cards"), [("dp=16", 8), ("dp=8,tp=2", 4), ("dp=4,tp=8", 1), ("dp=4,tp=16", 1)]
)
def test_a_ring_leaves_a_host_by_the_cards_of_its_ranks(text: str, cards: int) -> None:
    machine = replace(MACHINES["h100x8"], between=Link(50e9, 25e-6))
    link = link_of("dp", parse_mesh(text), machine)
    assert link.bytes_per_second == cards * machine.between.bytes_per_second
    assert link.latency_seconds == machine.between.latency_seconds
    on_gloo = link_of("dp", parse_mesh(text), replace(machine, backend="gloo"))
    assert on_gloo == machine.between


@pytest.mark.parametrize(
    ("collective", "nbytes", "microseconds"),
    [
        ("all-gather", 0.0, 14.0 + 14 * 1.9 + 4.0),  # LL128: eight ranks on each of two hosts
        ("all-reduce", 0.0, 14.0 + 2 * (14 * 1.9 + 4.0)),  # to add up, and to tell the sum
        ("all-gather", 400e9, 8.4 + 14 * 3.4 + 14.0 + 1e6),  # Simple, on eight cards of 50 GB/s
    ],
)
def test_a_ring_takes_what_nccl_says(collective: str, nbytes: int, microseconds: float) -> None:
    transfer = Transfer("", collective, "dp", "forward", 1, int(nbytes), "native", True)
    found = seconds_of_transfer(transfer, parse_mesh("dp=16"), MACHINES["h100x8"])
    assert found == pytest.approx(microseconds / 1e6)


def test_sums_over_replicas_hold_up_no_gather(tmp_path: Path) -> None:
    """Two layers: while replicas add up the second's, the first's are reduced over shards."""
    once = settings(tmp_path, replace(SLOW_LINK, ranks_per_host=2, between=Link(1e6, 0.0)))
    both = replace(once, mesh=parse_mesh("replicate=2,dp=2"))
    alone, found = draft(once).timing, draft(both).timing
    assert alone is not None
    assert found is not None
    sums = found.reduce_seconds - alone.reduce_seconds
    assert sums > 0
    first, second, *_ = (span for span in found.spans if span.lane == "reductions")
    assert first.end == pytest.approx(second.start)
    # Each of the two takes as long as the reduction of its layer, which hides all but the last.
    assert sums == pytest.approx(alone.reduce_seconds)
    assert found.step_seconds == pytest.approx(alone.step_seconds + sums / 2)


def test_a_root_that_is_freed_is_gathered_again(tmp_path: Path) -> None:
    def seconds(reshard: bool) -> float:
        mesh = parse_mesh("dp=8")
        timing = draft(Settings(mesh=mesh, units=("none",), reshard=reshard)).timing
        assert timing is not None
        return timing.step_seconds

    assert seconds(reshard=True) > seconds(reshard=False)


def test_blocks_move_what_codecs_made() -> None:
    def plan(reshard: bool | int) -> Document:
        return draft(Settings(mesh=parse_mesh("dp=8"), reshard=reshard, quantize="int8"))

    assert {t.payer for t in plan(4).traffic if t.phase == "backward"} >= {"native"}
    planned = {reshard: plan(reshard).timing for reshard in (False, 4, True)}
    steps = [timing.step_seconds for timing in planned.values() if timing is not None]
    assert steps == sorted(steps)
