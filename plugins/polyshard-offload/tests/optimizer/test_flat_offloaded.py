"""Flat steps and offload, in any order: one way to step, and the bits of torch's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_toys import TIERS, Model, RowNorm, assert_same_values, tokens_for
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from toy_models import full, loss_of

from polyshard import fully_shard
from polyshard.errors import UnsupportedError
from polyshard_offload import DiskSettings, Offload, OffloadError
from polyshard_optimizers import flat
from polyshard_optimizers.stepping.twins import Twins
from polyshard_testing import ranks

Make = Callable[[Any], Optimizer]
Tiers = tuple[str, str, str]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "SGD momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
}


class Mine(AdamW):
    """Elementwise, which only its user knows."""


def both(offload: Offload, optimizer: Optimizer) -> Optimizer:
    return offload.wrap(flat(optimizer))


def both_turned(offload: Offload, optimizer: Optimizer) -> Optimizer:
    return flat(offload.wrap(optimizer))


def flat_alone(offload: Offload, optimizer: Optimizer) -> Optimizer:
    return flat(optimizer)


Turn = Callable[[Offload, Optimizer], Optimizer]


def model_on(offload: Offload | None) -> Model:
    torch.manual_seed(0)
    model = Model(width=16, hidden=21, layers=2)
    plugins = [] if offload is None else [offload]
    for block in model.blocks:
        fully_shard(block, plugins=plugins)
    fully_shard(model, plugins=plugins)
    return model


def trained(model: Model, optimizer: Optimizer, rank: int, *, keeps: bool = True) -> list[float]:
    """Five steps: another learning rate, state that is loaded, a unit frozen for a while."""
    losses: list[float] = []
    saved: Any = None
    for step in range(5):
        first: Any = model.blocks[0]
        first.up.requires_grad_(step != 2)
        if step == 1:
            optimizer.param_groups[0]["lr"] *= 0.5
            saved = copy.deepcopy(optimizer.state_dict())
        if step == 3:
            optimizer.load_state_dict(saved)
        loss = loss_of(model, tokens_for(step, rank))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keeps or step % 2 == 0)
    return losses


def assert_same_state(one: Optimizer, other: Optimizer) -> None:
    """The order of entries included, which ranks rely on when they go through them together."""
    a, b = one.state_dict()["state"], other.state_dict()["state"]
    assert list(a) == list(b)
    for index in a:
        assert list(a[index]) == list(b[index])
        for name, value in a[index].items():
            found = b[index][name]
            assert type(found) is type(value)
            if isinstance(value, Tensor):
                assert torch.equal(full(value).cpu(), full(found).cpu()), (index, name)
            else:
                assert value == found


def sharded_steps(patch: pytest.MonkeyPatch) -> list[torch.Size]:
    """What twins step by operations on ``DTensor`` s, from now on: the slow way."""
    original, seen = Twins.step, list[torch.Size]()

    def step(self: Twins, parts: Any, state: Any) -> None:
        parts = [(group, list(own)) for group, own in parts]
        seen.extend(t.shape for _, own in parts for t in own if isinstance(t, DTensor))
        original(self, parts, state)

    patch.setattr(Twins, "step", step)
    return seen


def offload_on(tiers: Tiers, path: Path, **chosen: Any) -> Offload:
    params, grads, optimizer = tiers
    disk = DiskSettings(path=path)
    chosen = {"chunk_bytes": 2000, "disk": disk, **chosen}
    return Offload(params=params, grads=grads, optimizer=optimizer, **chosen)  # type: ignore[arg-type]


@functools.cache
def plainly(name: str, rank: int, *, keeps: bool) -> tuple[Model, Optimizer, list[float]]:
    """Without offload, stepped by torch; once a rank. Only to be looked at."""
    model = model_on(None)
    optimizer = OPTIMIZERS[name](model.parameters())
    return model, optimizer, trained(model, optimizer, rank, keeps=keeps)


def compare(rank: int, tiers: Tiers, path: Path, *turns: Turn, **chosen: Any) -> None:
    keeps = "step_in_backward" not in chosen
    for name, make in OPTIMIZERS.items():
        plain, expected, losses = plainly(name, rank, keeps=keeps)
        for turn in turns:
            offload = offload_on(tiers, path, **chosen)
            model = model_on(offload)
            with pytest.MonkeyPatch.context() as patch:
                sharded = sharded_steps(patch)
                optimizer = turn(offload, make(model.parameters()))
                assert trained(model, optimizer, rank, keeps=keeps) == losses, (name, turn)
            assert set(sharded) <= {torch.Size([])}, "only 0-dim parameters step apart"
            assert_same_values(model, plain)
            assert_same_state(optimizer, expected)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@ranks(2)
def test_both_ways_around(rank: int, size: int, tiers: Tiers, tmp_path: Path) -> None:
    compare(rank, tiers, tmp_path, both, both_turned)


@pytest.mark.parametrize("tiers", [TIERS[2], TIERS[7]], ids="-".join)
@ranks(2)
@pytest.mark.filterwarnings("ignore:Offload")
def test_flat_alone(rank: int, size: int, tiers: Tiers, tmp_path: Path) -> None:
    """Parameters and gradients that rest on the host or the disk are stepped where they are."""
    compare(rank, tiers, tmp_path, flat_alone)


@pytest.mark.parametrize("tiers", [TIERS[0], TIERS[5]], ids="-".join)
@ranks(2)
def test_a_part_is_offloaded(rank: int, size: int, tiers: Tiers, tmp_path: Path) -> None:
    compare(rank, tiers, tmp_path, both, fraction=0.4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tiers", [TIERS[2], TIERS[6]], ids="-".join)
@ranks(2)
def test_stepping_in_backward(rank: int, size: int, tiers: Tiers, tmp_path: Path) -> None:
    compare(rank, tiers, tmp_path, both_turned, step_in_backward=True)
    compare(rank, tiers, tmp_path, both, step_in_backward=True, fraction=0.4)


# Classes that are not in the table ---------------------------------------------------------------


class Counting(Optimizer):
    """Elementwise; its counter is a number, and it puts new tensors instead of old ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                p.sub_(state["mean"], alpha=group["lr"] / state["step"])


def declared(offload: Offload, optimizer: Optimizer) -> Optimizer:
    return offload.wrap(flat(optimizer, elementwise=True))


def declared_later(offload: Offload, optimizer: Optimizer) -> Optimizer:
    return flat(offload.wrap(optimizer), elementwise=True)


def undeclared(offload: Offload, optimizer: Optimizer) -> Optimizer:
    return offload.wrap(optimizer)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("params", ["device", "host"])
@pytest.mark.parametrize("turn", [declared, declared_later, undeclared])
def test_classes_nobody_knows(tmp_path: Path, turn: Turn, params: str, tier: str) -> None:
    """They step whole parameters, unless their user says that they are elementwise."""
    for kind in (Mine, Counting):
        weights = [[nn.Parameter(torch.ones(40, 5)) for _ in range(3)] for _ in range(2)]
        offload = Offload(params=params, optimizer=tier, disk=DiskSettings(path=tmp_path))  # type: ignore[arg-type]
        optimizer, plain = turn(offload, kind(weights[0])), kind(weights[1])
        places = []
        for step in range(4):
            with pytest.MonkeyPatch.context() as patch:
                dims = dims_of_steps(patch)
                for opt, own in ((optimizer, weights[0]), (plain, weights[1])):
                    for index, parameter in enumerate(own):
                        parameter.grad = torch.full_like(parameter, 0.1 + index + step)
                    opt.step()
            assert dims == ({2} if turn is undeclared else {1})
            state = optimizer.state[weights[0][1]]
            places.append([v.data_ptr() for v in state.values() if isinstance(v, Tensor)])
        assert places[1:] == places[:1] * 3 or turn is not undeclared, "windows stay"
        assert all(map(torch.equal, *weights))
        assert_same_state(optimizer, plain)


def dims_of_steps(patch: pytest.MonkeyPatch) -> set[int]:
    """Of the tensors that twins step from now on."""
    original, seen = Twins.step, set[int]()

    def step(self: Twins, parts: Any, state: Any) -> None:
        parts = [(group, list(own)) for group, own in parts]
        seen.update(t.ndim for _, own in parts for t in own)
        original(self, parts, state)

    patch.setattr(Twins, "step", step)
    return seen


def test_one_refusal(tmp_path: Path) -> None:
    offload = Offload(optimizer="host")
    params = [nn.Parameter(torch.ones(4, 4))]
    with pytest.raises(UnsupportedError, match="RowNorm is not among the optimizers known"):
        flat(offload.wrap(RowNorm(params, lr=0.1)))
    with pytest.raises(UnsupportedError, match="Muon cannot be stepped in runs: it makes"):
        flat(offload.wrap(torch.optim.Muon(params)), elementwise=True)
    with pytest.raises(OffloadError, match="wrapped already"):
        offload.wrap(flat(offload.wrap(AdamW(params))))
    optimizer = flat(AdamW(params))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(OffloadError, match=r"Call Offload\.wrap first and make the scheduler"):
        offload.wrap(optimizer)
    wrapped = both(offload, AdamW(params))
    assert flat(wrapped) is wrapped
    with pytest.raises(OffloadError, match="every chunk of parameters"):
        wrapped.step(lambda: 1.0)
    assert isinstance(wrapped, AdamW)
