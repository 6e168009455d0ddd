"""Backwards that the caller ends: what it gives, and when it is refused, as in torch 2.15."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from toy_models import build, full, loss_of, reset_together, shard, tokens_for
from toy_observers import Watching

import polyshard
from polyshard import (
    FSDPModule,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    Plugin,
    StorageFactory,
    fully_shard,
    hookimpl,
)
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import GroupInfo
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import ranks

TORCH_HAS_IT = hasattr(torch_fsdp.FSDPModule, "finalize_backward")
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}


def small(function: Callable[..., Any], **kwargs: Any) -> Any:
    return shard(build(width=24, hidden=30, layers=2), function, **kwargs)


def end(model: Any, how: str) -> None:
    if how == "waited for":
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        handle.wait()
    else:
        assert model.finalize_backward() is None


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else full(p.grad) for p in model.parameters()]


def assert_same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) is (b is None)
        if a is not None and b is not None:
            assert torch.equal(a, b)


@pytest.mark.parametrize("how", ["at once", "waited for"])
@pytest.mark.parametrize("policy", list(POLICIES))
@ranks(2)
def test_micro_batches_that_a_call_ends(rank: int, size: int, policy: str, how: str) -> None:
    """As torch's engine, by hand where it can and by itself where not."""
    models = [small(f, mp_policy=POLICIES[policy]) for f in (torch_fsdp.fully_shard, fully_shard)]
    by_hand = [TORCH_HAS_IT, True]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for step in range(3):
        for model, optimizer, manual in zip(models, optimizers, by_hand, strict=True):
            if manual:
                model.set_manual_backward_finalization(True)
            model.set_reshard_after_backward(False)
            for micro in range(3):
                last = micro == 2 and not manual
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                loss_of(model, tokens_for(3 * step + micro, rank)).backward()
            if manual:
                model.set_requires_gradient_sync(True)
                model.set_reshard_after_backward(True)
                end(model, how)
            optimizer.step()
            assert all(p.device_mesh for p in model.parameters()), "sharded again"
        assert_same(gradients(models[1]), gradients(models[0]))
        for optimizer in optimizers:
            optimizer.zero_grad()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(full(ours), full(theirs))


class TwoPaths(nn.Module):
    """Units of which a backward may reach one only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        out: Tensor = self.first(x)
        return self.second(out) if both else out


def paths(function: Callable[..., Any], **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = TwoPaths()
    for part in (model.first, model.second, model):
        if part is not model or kwargs.get("root", True):
            function(part, **{k: v for k, v in kwargs.items() if k != "root"})
    return model


def reached_and_not(function: Callable[..., Any], rank: int) -> list[list[Tensor | None]]:
    """Gradients after each of two backwards, and after the call."""
    model = paths(function)
    model.set_manual_backward_finalization(True)
    seen = []
    model.set_requires_gradient_sync(False)
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    seen.append(gradients(model))
    model.set_requires_gradient_sync(True)
    model(torch.full((2, 4), rank + 2.0), both=False).sum().backward()
    second = model.second.weight.grad
    seen.append([None if second is None else full(second)])
    model.finalize_backward()
    seen.append(gradients(model))
    return seen


@ranks(2)
def test_what_no_backward_reached_waits_for_the_call(rank: int, size: int) -> None:
    found = reached_and_not(fully_shard, rank)
    assert found[0] == [None] * 4
    assert found[1] == [None], "the unit that the second backward did not reach"
    single = TwoPaths()
    for parameter, value in zip(single.parameters(), paths(fully_shard).parameters(), strict=True):
        parameter.data = full(value.detach()).clone()
    for r in range(size):
        (single(torch.full((2, 4), r + 1.0)).sum() / size).backward()
        (single(torch.full((2, 4), r + 2.0), both=False).sum() / size).backward()
    for ours, expected in zip(found[2], single.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.grad)
    if TORCH_HAS_IT:
        for a, b in zip(found, reached_and_not(torch_fsdp.fully_shard, rank), strict=True):
            assert_same(a, b)


@ranks(2)
def test_the_iteration_ends_when_the_call_ends_it(rank: int, size: int) -> None:
    """Also for observers, and whatever ``set_is_last_backward`` says."""
    watching = Watching()
    model: Any = paths(fully_shard, plugins=[watching])
    model.set_is_last_backward(False)
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    events = watching.watcher.events
    assert events.count("step end") == 0
    model.finalize_backward()
    assert events.count("step end") == 1
    model.set_manual_backward_finalization(False)
    model.set_is_last_backward(True)
    model(torch.ones(2, 4)).sum().backward()
    assert events.count("step end") == 2
    torch.testing.assert_close(full(model.second.bias.grad), torch.full((4,), 6.0))


class Held(DeviceStorage):
    """Gets the gradients of an iteration once."""

    holds_gradients = True
    placed = 0

    def place_gradient(self, gradient: Tensor) -> Tensor:
        Held.placed += 1
        return gradient


class HeldFactory(StorageFactory):
    name = "held"

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Held:
        return Held()


class Holding(Plugin):
    name = "holding"

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> HeldFactory:
        return HeldFactory()


@ranks(2)
def test_storages_that_hold_gradients_get_them_at_the_end(rank: int, size: int) -> None:
    """The sums of synchronised backwards, and of what the call itself reduces."""
    Held.placed = 0
    models = [paths(fully_shard, plugins=plugins) for plugins in ([Holding()], [])]
    for model in models:
        model.set_manual_backward_finalization(True)
        for micro in range(3):
            model.set_requires_gradient_sync(micro != 2)
            model(torch.full((2, 4), rank + micro + 1.0)).sum().backward()
        assert Held.placed == (0 if model is models[0] else 2)
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
    assert Held.placed == 2, "once for each group"
    assert_same(gradients(models[0]), gradients(models[1]))


class Verdicts:
    """Which of some calls were refused with a ``RuntimeError``."""

    def __init__(self) -> None:
        self.refused: dict[str, bool] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        self.refused[what] = False
        try:
            yield
        except RuntimeError:
            self.refused[what] = True


def modes(function: Callable[..., Any]) -> dict[str, bool]:
    """When the mode may change, and who may ask for it."""
    verdicts = Verdicts()
    x = torch.ones(2, 4)
    model = paths(function)
    with verdicts.of("before the first forward: end"):
        model.finalize_backward()
    with verdicts.of("before the first forward: handle"):
        model.finalize_backward(async_op=True).wait()
    early = paths(function)
    with verdicts.of("not the root, before the first forward: mode"):
        early.first.set_manual_backward_finalization(True)
    with verdicts.of("the forward of a root above it"):
        early(x)
    return {**verdicts.refused, **modes_of(model, x)}


def modes_of(model: Any, x: Tensor) -> dict[str, bool]:
    verdicts = Verdicts()
    model(x)
    with verdicts.of("automatic: end"):
        model.finalize_backward()
    with verdicts.of("not the root: mode"):
        model.first.set_manual_backward_finalization(True)
    with verdicts.of("not the root: same mode"):
        model.first.set_manual_backward_finalization(False)
    with verdicts.of("not the root: end"):
        model.first.finalize_backward()
    out = model(x)

    def change(grad: Tensor) -> None:
        with verdicts.of("in backward: another mode"):
            model.set_manual_backward_finalization(True)
        with verdicts.of("in backward: same mode"):
            model.set_manual_backward_finalization(False)

    out.register_hook(change)
    out.sum().backward()
    with verdicts.of("between iterations: another mode"):
        model.set_manual_backward_finalization(True)
    with verdicts.of("manual, nothing done: end"):
        model.finalize_backward()
    model(x).sum().backward()
    with verdicts.of("after a backward: another mode"):
        model.set_manual_backward_finalization(False)
    with verdicts.of("after a backward: same mode"):
        model.set_manual_backward_finalization(True)
    with verdicts.of("after a backward: end"):
        model.finalize_backward()
    with verdicts.of("ended: another mode"):
        model.set_manual_backward_finalization(False)
    return verdicts.refused


MODES = {
    "before the first forward: end": False,
    "before the first forward: handle": False,
    "not the root, before the first forward: mode": False,
    "the forward of a root above it": True,
    "automatic: end": True,
    "not the root: mode": True,
    "not the root: same mode": True,
    "not the root: end": True,
    "in backward: another mode": True,
    "in backward: same mode": False,
    "between iterations: another mode": False,
    "manual, nothing done: end": False,
    "after a backward: another mode": True,
    "after a backward: same mode": False,
    "after a backward: end": False,
    "ended: another mode": False,
}


@ranks(2)
def test_when_the_mode_may_change(rank: int, size: int) -> None:
    assert modes(fully_shard) == MODES
    if TORCH_HAS_IT:
        assert modes(torch_fsdp.fully_shard) == MODES


def in_backward(function: Callable[..., Any]) -> bool:
    verdicts = Verdicts()
    model = paths(function)
    model.set_manual_backward_finalization(True)
    x = torch.ones(2, 4, requires_grad=True)

    def finish(grad: Tensor) -> None:
        with verdicts.of("end"):
            model.finalize_backward()

    x.register_hook(finish)
    model(x).sum().backward()
    model.finalize_backward()
    return verdicts.refused["end"]


@ranks(2)
def test_a_backward_is_not_ended_while_it_runs(rank: int, size: int) -> None:
    assert in_backward(fully_shard)
    assert not TORCH_HAS_IT or in_backward(torch_fsdp.fully_shard)


def handles(function: Callable[..., Any], share: Callable[..., Any]) -> dict[str, bool]:
    """What may happen while a handle is to be waited for."""
    verdicts = Verdicts()
    x = torch.ones(2, 4)
    one, other = paths(function), paths(function)
    apart = paths(function)
    share([one, other])
    for model in (one, other, apart):
        model.set_manual_backward_finalization(True)
        model(x).sum().backward()
    with verdicts.of("others at work: start"):
        one.finalize_backward(async_op=True)
    other.finalize_backward()
    handle = one.finalize_backward(async_op=True)
    with verdicts.of("pending: forward"):
        one(x)
    with verdicts.of("pending: end again"):
        one.finalize_backward()
    with verdicts.of("pending: start again"):
        one.finalize_backward(async_op=True)
    with verdicts.of("pending: forward of a root that shares"):
        other(x)
    with verdicts.of("pending: end of a root that shares"):
        other.finalize_backward()
    with verdicts.of("pending: reset of a root that shares"):
        other.reset_iter_state()
    with verdicts.of("pending: a root that does not share"):
        apart.finalize_backward()
        apart(x).sum().backward()
        apart.finalize_backward(async_op=True).wait()
    with verdicts.of("wait"):
        handle.wait()
    with verdicts.of("wait again"):
        handle.wait()
    with verdicts.of("waited for: forward and end"):
        one(x).sum().backward()
        one.finalize_backward()
    return {**verdicts.refused, **reset(one, x)}


def reset(model: Any, x: Tensor) -> dict[str, bool]:
    verdicts = Verdicts()
    model(x).sum().backward()
    handle = model.finalize_backward(async_op=True)
    reset_together(model)
    with verdicts.of("wait after a reset"):
        handle.wait()
    with verdicts.of("next iteration after a reset"):
        model(x).sum().backward()
        model.finalize_backward(async_op=True).wait()
    return verdicts.refused


HANDLES = {
    "others at work: start": True,
    "pending: forward": True,
    "pending: end again": True,
    "pending: start again": True,
    "pending: forward of a root that shares": True,
    "pending: end of a root that shares": True,
    "pending: reset of a root that shares": True,
    "pending: a root that does not share": False,
    "wait": False,
    "wait again": False,
    "waited for: forward and end": False,
    "wait after a reset": True,
    "next iteration after a reset": False,
}


@ranks(2)
def test_what_waits_for_a_handle(rank: int, size: int) -> None:
    assert handles(fully_shard, polyshard.share_comm_ctx) == HANDLES
    if TORCH_HAS_IT:
        assert handles(torch_fsdp.fully_shard, torch_fsdp.share_comm_ctx) == HANDLES


@ranks(2)
def test_a_frozen_root_has_no_backward_to_wait_for(rank: int, size: int) -> None:
    """A teacher, run with grad mode: nothing of it requires grad."""
    teacher: Any = fully_shard(nn.Linear(4, 4).requires_grad_(False))
    model: Any = paths(fully_shard)
    polyshard.share_comm_ctx([teacher, model])
    model.set_manual_backward_finalization(True)
    model(teacher(torch.ones(2, 4))).sum().backward()
    model.finalize_backward(async_op=True).wait()
    assert gradients(model)


@ranks(2)
def test_a_handle_is_torchs_kind_and_is_waited_for_repeatedly(rank: int, size: int) -> None:
    model: Any = paths(fully_shard)
    model.set_manual_backward_finalization(True)
    model(torch.ones(2, 4)).sum().backward()
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    assert isinstance(handle, getattr(torch_fsdp, "GradientReductionHandle", object))
    handle.wait()
    expected = gradients(model)
    handle.wait()
    assert_same(gradients(model), expected)
    assert isinstance(model, FSDPModule)


def hybrid(function: Callable[..., Any], mesh: DeviceMesh) -> dict[str, bool]:
    verdicts = Verdicts()
    x = torch.ones(2, 4)
    model = paths(function, mesh=mesh)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    with verdicts.of("pending without all-reduce"):
        model.finalize_backward()
    model.set_requires_all_reduce(True)
    with verdicts.of("pending with all-reduce"):
        model.finalize_backward()
    model.set_requires_all_reduce(False)
    model(x).sum().backward()
    model.set_requires_all_reduce(True)
    with verdicts.of("partial sums of replicas"):
        model.finalize_backward()
    return verdicts.refused


@ranks(4)
def test_replicas(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    expected = {
        "pending without all-reduce": True,
        "pending with all-reduce": False,
        "partial sums of replicas": True,
    }
    assert hybrid(fully_shard, mesh) == expected
    if TORCH_HAS_IT:
        assert hybrid(torch_fsdp.fully_shard, mesh) == expected


def after_a_reset(function: Callable[..., Any], rank: int) -> list[Tensor | None]:
    model = paths(function)
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    reset_together(model)
    return gradients(model)


@ranks(2)
def test_a_reset_treats_sharded_gradients_as_torch_does(rank: int, size: int) -> None:
    theirs = after_a_reset(torch_fsdp.fully_shard, rank)
    assert_same(after_a_reset(fully_shard, rank), theirs)
