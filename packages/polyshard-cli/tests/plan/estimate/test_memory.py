"""Predicted memory is what real ranks take; parts are checked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import plan_models
import pytest
import torch
import torch.nn.functional as F
from plan_runs import measured_peak
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from polyshard_cli.plan import Settings, draft, parse_mesh
from polyshard_cli.plan.dry_run.probing import Account, Recorder, leaves_of
from polyshard_testing.world import World

SMALL = Settings(
    model="plan_models:small",
    mesh=parse_mesh("dp=2"),
    batch=4,
    sequence=256,
    backend="gloo",
    optimizer="sgd",
)
PAIR = Settings(
    model="plan_models:Pair", mesh=parse_mesh("dp=2"), sequence=4, inputs="plan_models:pair_inputs"
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sequence", [16, 64, 256])
@pytest.mark.parametrize(
    "given",
    [{}, {"reshard": False}, {"bf16": True}],
    ids=["freed", "kept", "bf16"],
)
def test_the_peak_is_the_allocators(world2: World, given: dict[str, object], sequence: int) -> None:
    """From a step of which parameters are most to one of which activations are."""
    settings = replace(SMALL, sequence=sequence, **given)  # type: ignore[arg-type]
    memory = draft(settings).memory
    rest = memory.phases[0].total
    for measured in world2.run(measured_peak, settings):
        assert memory.peak.total == pytest.approx(rest + measured, rel=0.03)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "units",
    [("blocks.*/2",), ("blocks.*.attention", "blocks.*.feed_forward")],
    ids=["pairs", "parts"],
)
@pytest.mark.parametrize("sequence", [16, 256])
@pytest.mark.parametrize("reshard", [None, False])
def test_the_peak_with_other_units(
    world2: World, units: tuple[str, ...], reshard: bool | None, sequence: int
) -> None:
    """Between parts of blocks the root adds and normalizes, and keeps what autograd needs of it."""
    settings = replace(SMALL, sequence=sequence, units=units, reshard=reshard)
    memory = draft(settings).memory
    for measured in world2.run(measured_peak, settings):
        assert memory.peak.total == pytest.approx(memory.phases[0].total + measured, rel=0.03)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_the_peak_with_gradients_that_wait(world2: World, accumulate: int, bf16: bool) -> None:
    """A micro-batch between the first and the last holds all gradients to its end."""
    settings = replace(SMALL, accumulate=accumulate, batch=2 * accumulate, bf16=bf16)
    memory = draft(settings).memory
    for measured in world2.run(measured_peak, settings):
        assert memory.peak.total == pytest.approx(memory.phases[0].total + measured, rel=0.03)


def test_blocks_keep_their_slices(world4: World) -> None:
    settings = replace(SMALL, mesh=parse_mesh("dp=4"), sequence=16, reshard=2)
    memory = draft(settings).memory
    for measured in world4.run(measured_peak, settings):
        assert memory.peak.total == pytest.approx(memory.phases[0].total + measured, rel=0.03)
    freed, kept = (draft(replace(settings, reshard=r)).memory.phases[1] for r in (None, False))
    assert freed.unsharded < memory.phases[1].unsharded < kept.unsharded


def saved_by_torch(model: torch.nn.Module, tokens: Tensor) -> int:
    still = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in still:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    del loss
    return sum(saved.values())


def test_activations_are_those_that_autograd_saves() -> None:
    from polyshard_cli.plan.dry_run.probing import probe
    from polyshard_cli.plan.dry_run.units import units_of

    model = plan_models.small()
    real = saved_by_torch(model, torch.zeros(2, 256, dtype=torch.int64))
    planned = plan_models.small().to("meta")
    tokens = torch.zeros(2, 256, dtype=torch.int64, device="meta")
    found = probe(planned, units_of(planned), tokens)
    total = found.root.saved_bytes + sum(cost.saved_bytes for cost in found.units.values())
    assert not found.problem
    assert total == pytest.approx(real, rel=0.02)


def test_mixed_precision_reaches_what_tensor_parallelism_cuts() -> None:
    pytest.importorskip("polyshard_tensor_parallel")
    one = Settings(model="demo:tiny", mesh=parse_mesh("dp=2,tp=2"), sequence=64)
    wide, narrow = (
        {t.unit: t.payload_bytes for t in draft(s).traffic if t.axis == "tp"}
        for s in (one, replace(one, bf16=True))
    )
    # Sums over ranks of what a block adds to its input: 2 x [1, 64, 32] in backward and forward.
    assert narrow["blocks.*"] * 2 == wide["blocks.*"]


def test_rest_by_hand() -> None:
    memory = draft(PAIR).memory
    elements = 2 * (8 * 8 + 8) // 2  # two layers, over two ranks
    rest = memory.phases[0]
    assert (rest.parameters, rest.gradients, rest.optimizer) == (
        4 * elements,
        4 * elements,
        8 * elements,
    )
    assert (rest.unsharded, rest.activations) == (0, 0)
    forward = memory.phases[1]
    # Both layers: the second is gathered while the first runs. Biases start on 64 bytes.
    assert forward.unsharded == 2 * 4 * (8 * 8 + 16)


def test_tiers_hold_what_leaves_the_device() -> None:
    pytest.importorskip("polyshard_offload")
    here = draft(SMALL).memory
    optimizer = replace(SMALL, optimizer="adamw", offload="optimizer=host,fraction=0.5")
    moved = draft(optimizer).memory
    state = 2 * here.phases[0].parameters
    assert moved.tiers == {"host": {"optimizer": pytest.approx(state / 2, rel=0.01)}}
    assert moved.phases[0].optimizer == pytest.approx(state / 2, rel=0.01)
    away = draft(replace(SMALL, offload="params=host")).memory
    assert set(away.tiers["host"]) == {"parameters", "gradients"}
    assert (away.phases[0].parameters, away.phases[0].gradients) == (0, 0)


@pytest.mark.parametrize(("optimizer", "values"), [("adamw", 1), ("momentum", 0), ("sgd", 0)])
def test_what_optimizers_hold_while_they_step(optimizer: Literal["adamw"], values: int) -> None:
    """Values an element: AdamW's foreach step makes roots of its second moments."""
    *_, stepping = draft(replace(PAIR, optimizer=optimizer)).memory.phases
    assert (stepping.name, stepping.transfers) == ("optimizer", values * stepping.parameters)


@pytest.mark.parametrize(("make", "values"), [(torch.optim.AdamW, 1), (torch.optim.SGD, 0)])
def test_so_do_torchs(make: Any, values: int) -> None:
    parameter = nn.Parameter(torch.ones(1000))
    settings = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizer = make([parameter], lr=0.1, foreach=True, **settings)
    recorder, account = Recorder(), Account()
    for _ in range(2):  # state is made in the first step
        parameter.grad = torch.ones(1000)
        with recorder, recorder.on(account):
            account.peak_bytes = 0
            recorder.know([parameter, parameter.grad])
            recorder.know(leaves_of(dict(optimizer.state)))
            optimizer.step()
    assert account.peak_bytes == pytest.approx(values * parameter.nbytes, abs=100)
