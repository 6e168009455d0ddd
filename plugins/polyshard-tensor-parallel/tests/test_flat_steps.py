"""Flat steps of parameters that are sharded on a data-parallel and a tensor-parallel axis."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from toy_flat import assert_same, local_part
from toy_optimizers import EVERY, Make, runs_of
from tp_models import loss_of, meshes, mlp, mlp_plan, shard_blocks, tiny, tokens_for

from polyshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from polyshard_optimizers import flat
from polyshard_tensor_parallel import TensorParallel, demo_plan
from polyshard_testing import ranks

LAYOUTS = {"fsdp2 x tp2": (2, 2, 0), "hsdp2x1 x tp2": (1, 2, 2), "fsdp1 x tp4": (1, 4, 0)}
Event = Callable[[int, "Trained"], None]


class Trained:
    """A model on both axes and its optimizer; ``is_flat`` says how that steps."""

    def __init__(
        self, make: Make, rank: int, layout: str, *, is_flat: bool, **keywords: Any
    ) -> None:
        dp, tp, replicas = LAYOUTS[layout]
        mesh = meshes(dp, tp, replicas)
        plugin = TensorParallel(demo_plan(sequence_parallel=True), mesh=mesh["tp"])
        self.model = tiny()
        plugin.apply(self.model)
        data: Any = mesh["replicas", "dp"] if replicas else mesh["dp"]
        shard_blocks(self.model, mesh=data, plugins=[plugin], **keywords)
        self.part = rank // tp
        self.optimizer = make(self.model.parameters())
        self.saved: Any = None
        if is_flat:
            flat(self.optimizer)

    def step(self, index: int, event: Event | None) -> float:
        loss = loss_of(self.model, tokens_for(index, self.part))
        loss.backward()
        if event is not None:
            event(index, self)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def compare(
    name: str, rank: int, layout: str, event: Event | None = None, **keywords: Any
) -> Trained:
    """Train both ways for some steps."""
    make = EVERY[name]
    pair = [Trained(make, rank, layout, is_flat=is_flat, **keywords) for is_flat in (False, True)]
    for index in range(5):
        losses = [trained.step(index, event) for trained in pair]
        assert losses[0] == losses[1]
        assert_same(*pair)  # type: ignore[arg-type]
    return pair[1]


def clip(index: int, trained: Trained) -> None:
    clip_grad_norm_(trained.model.parameters(), 0.1)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("layout", "name"),
    [*((layout, "AdamW fused") for layout in LAYOUTS), ("fsdp2 x tp2", "AdamW foreach")],
)
@ranks(4)
def test_the_bits_of_torchs_steps(rank: int, size: int, layout: str, name: str) -> None:
    ours = compare(name, rank, layout, clip)
    assert any(isinstance(p, DTensor) and p.device_mesh.ndim > 1 for p in ours.model.parameters())
    # Those that tensor parallelism cuts and those it repeats rest end to end, too.
    assert sum(runs_of(ours.optimizer)) == len(list(ours.model.parameters()))
    assert len(runs_of(ours.optimizer)) < sum(runs_of(ours.optimizer))


def edit(index: int, trained: Trained) -> None:
    """State in place, replaced and moved; then loaded."""
    first, second, third, *_ = trained.model.parameters()
    state = trained.optimizer.state
    if index == 2:
        trained.saved = copy.deepcopy(trained.optimizer.state_dict())
        state[first]["exp_avg"].mul_(0.5)
        state[second]["exp_avg_sq"] = state[second]["exp_avg_sq"] * 2
        state[second]["step"].add_(2.0)
        local_part(state[third]["exp_avg"]).data = local_part(state[third]["exp_avg"]) * 3
    if index == 4:
        trained.optimizer.load_state_dict(trained.saved)


def own_gradients(index: int, trained: Trained) -> None:
    for place, parameter in enumerate(trained.model.parameters()):
        if parameter.grad is not None and (place + index) % 3 == 0:
            parameter.grad = None if index == 3 else parameter.grad * 0.5


def freeze(index: int, trained: Trained) -> None:
    blocks: Any = trained.model.blocks
    blocks[0].requires_grad_(index not in (1, 2))


def regroup(index: int, trained: Trained) -> None:
    """Some parameters go to a group of their own."""
    if index == 2:
        chosen = trained.optimizer.param_groups[0]["params"][3:6]
        del trained.optimizer.param_groups[0]["params"][3:6]
        trained.optimizer.add_param_group({"params": chosen, "lr": 0.1})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("event", [edit, own_gradients, freeze, regroup], ids=lambda e: e.__name__)
@ranks(4)
def test_what_users_do_between_steps(rank: int, size: int, event: Event) -> None:
    compare("AdamW fused", rank, "fsdp2 x tp2", event)


@ranks(4)
def test_mixed_precision(rank: int, size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compare("AdamW", rank, "fsdp2 x tp2", mp_policy=policy)


@ranks(4)
def test_a_gradient_scaler_scales_and_skips(rank: int, size: int) -> None:
    make: Make = lambda p: AdamW(p, fused=True)  # noqa: E731
    pair = [Trained(make, rank, "fsdp2 x tp2", is_flat=is_flat) for is_flat in (False, True)]
    scalers = [
        torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0, growth_interval=2)
        for _ in pair
    ]
    for index in range(4):
        for trained, scaler in zip(pair, scalers, strict=True):
            loss = loss_of(trained.model, tokens_for(index, trained.part))
            scaler.scale(loss * (float("inf") if index == 2 else 1.0)).backward()
            scaler.step(trained.optimizer)
            scaler.update()
            trained.optimizer.zero_grad()
        assert_same(*pair)  # type: ignore[arg-type]
    assert scalers[0].get_scale() == scalers[1].get_scale() == 8.0


@pytest.mark.parametrize("hidden", [10, 2])
@ranks(4)
def test_uneven_and_empty_shards(rank: int, size: int, hidden: int) -> None:
    """Five rows of a tensor-parallel part over two ranks; one row."""
    pair = []
    for is_flat in (False, True):
        mesh = meshes(2, 2)
        plugin = TensorParallel(mlp_plan(), mesh=mesh["tp"])
        model: Any = mlp(hidden=hidden)
        plugin.apply(model)
        fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
        optimizer = AdamW(model.parameters(), lr=0.1)
        if is_flat:
            flat(optimizer)
        for index in range(3):
            generator = torch.Generator().manual_seed(10 * index + rank // 2)
            model(torch.randn(3, 10, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.append(model)
    for one, other in zip(*(model.parameters() for model in pair), strict=True):
        assert torch.equal(local_part(one), local_part(other))
