"""Ranks: flat steps beside the same optimizer as torch steps it, on sharded parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.optim import AdamW
from toy_flat import Event, Trained, assert_same, compare, local_part
from toy_models import build, full, loss_of, shard, tokens_for
from toy_optimizers import EVERY, runs_of, same_bits

from polyshard import MixedPrecisionPolicy, attach_optimizer, clip_grad_norm_, fully_shard
from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_optimizers import flat
from polyshard_testing import ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "AdamW fused"])
@ranks(2)
def test_twenty_steps_are_bitwise_fsdp2s(rank: int, size: int, name: str) -> None:
    """Weights after 20 steps, against torch's engine and torch's way to step."""
    theirs = Trained(EVERY[name], rank, is_flat=False, sharding=torch_fully_shard)
    ours = Trained(EVERY[name], rank, is_flat=True)
    for index in range(20):
        assert theirs.step(index) == ours.step(index)
    assert_same(theirs, ours)


@pytest.mark.parametrize("name", ["Adagrad", "NAdam", "SGD", "SGD momentum", "ASGD"])
@ranks(3)
def test_other_optimizers_on_uneven_shards(rank: int, size: int, name: str) -> None:
    compare(EVERY[name], rank)


@ranks(2)
def test_rprop_steps_shards(rank: int, size: int) -> None:
    """torch cannot: the operations of Rprop are not all known to ``DTensor``."""
    trained = Trained(EVERY["Rprop"], rank, is_flat=True)
    plain = [nn.Parameter(local_part(p).clone()) for p in trained.model.parameters()]
    oracle = EVERY["Rprop"](plain)

    def follow(index: int, trained: Trained) -> None:
        for one, sharded in zip(plain, trained.model.parameters(), strict=True):
            assert sharded.grad is not None
            one.grad = local_part(sharded.grad).clone()
        oracle.step()

    for index in range(4):
        trained.step(index, follow)
        for one, sharded in zip(plain, trained.model.parameters(), strict=True):
            assert same_bits(one, local_part(sharded))


@ranks(2)
def test_a_group_is_a_run(rank: int, size: int) -> None:
    """Shards of even parameters rest without holes: one run a unit."""
    model = build(width=64, hidden=64, layers=3)
    shard(model, fully_shard)
    optimizer = flat(AdamW(model.parameters(), fused=True))
    for index in range(3):
        loss_of(model, tokens_for(index, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(runs_of(optimizer)) <= 3 + 2  # the last unit's table is odd: 101 rows


@ranks(4)
def test_replicas_and_other_dims(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    compare(EVERY["AdamW"], rank, mesh=mesh)
    compare(EVERY["AdamW fused"], rank, shard_placement_fn=lambda p: Shard(p.ndim - 1))


@ranks(2)
def test_mixed_precision(rank: int, size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compare(EVERY["AdamW"], rank, mp_policy=policy)


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
@ranks(2)
def test_several_dtypes_in_a_unit(rank: int, size: int, name: str) -> None:
    """Each dtype is a run of its own, with state of its dtype."""
    pair: list[Any] = []
    for is_flat in (False, True):
        model: Any = build(width=64, hidden=50, layers=2)
        for block in model.blocks:
            block.up.to(torch.bfloat16)
            block.up.register_forward_pre_hook(lambda _, given: given[0].bfloat16())
            block.up.register_forward_hook(lambda _, __, made: made.float())
        optimizer = EVERY[name](shard(model, fully_shard).parameters())
        pair.append(
            SimpleNamespace(model=model, optimizer=flat(optimizer) if is_flat else optimizer)
        )
    for index in range(4):
        for trained in pair:
            loss_of(trained.model, tokens_for(index, rank)).backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        assert_same(*pair)
    dtypes = {v["exp_avg"].dtype for v in pair[1].optimizer.state.values()}
    assert dtypes == {torch.float32, torch.bfloat16}


def clip(index: int, trained: Trained) -> None:
    clip_grad_norm_(trained.model.parameters(), 0.1)


def own_gradients(index: int, trained: Trained) -> None:
    if index % 2:
        for parameter in trained.model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 0.5


def keep_gradients(index: int, trained: Trained) -> None:
    """Then the next step's are elsewhere."""
    trained.kept.append([p.grad for p in trained.model.parameters()])


def drop_some(index: int, trained: Trained) -> None:
    for place, parameter in enumerate(trained.model.parameters()):
        if (place + index) % 5 == 0:
            parameter.grad = None


def freeze(index: int, trained: Trained) -> None:
    trained.model.blocks[0].requires_grad_(index not in (1, 2))


def accumulate(index: int, trained: Trained) -> None:
    loss_of(trained.model, tokens_for(index + 100, trained.rank)).backward()


def zero(index: int, trained: Trained) -> None:
    """Gradients that are zero instead of none, to which the next backward adds."""
    trained.optimizer.step()
    trained.optimizer.zero_grad(set_to_none=False)
    accumulate(index, trained)


def edit(index: int, trained: Trained) -> None:
    first, second, *_ = trained.model.parameters()
    state = trained.optimizer.state
    if index == 2:
        state[first]["exp_avg"].mul_(0.5)
        state[second]["exp_avg_sq"] = state[second]["exp_avg_sq"] * 2
        state[second]["step"].add_(2.0)


def reload(index: int, trained: Trained) -> None:
    if index == 1:
        trained.saved = copy.deepcopy(trained.optimizer.state_dict())
    if index == 3:
        trained.optimizer.load_state_dict(trained.saved)


def replace(index: int, trained: Trained) -> None:
    if index == 2:
        values = {n: p.detach() * 2 for n, p in trained.model.named_parameters()}
        trained.model.load_state_dict(values, assign=True)
        trained.optimizer.state.clear()
        del trained.optimizer.param_groups[:]
        trained.optimizer.add_param_group({"params": list(trained.model.parameters())})


def write(index: int, trained: Trained) -> None:
    """Through ``.data``, which no counter tells of."""
    for parameter in trained.model.parameters():
        parameter.data.mul_(0.5)


EVENTS = (
    clip,
    own_gradients,
    keep_gradients,
    drop_some,
    freeze,
    accumulate,
    zero,
    edit,
    reload,
    replace,
    write,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
@ranks(2)
def test_whatever_users_do_between_steps(rank: int, size: int, event: Event) -> None:
    compare(lambda p: AdamW(p, lr=1e-2), rank, event)


@ranks(2)
def test_memory_of_gradients_is_used_again(rank: int, size: int) -> None:
    """A plan holds no gradient, so that the engine may reduce into the same memory."""
    trained = Trained(EVERY["AdamW"], rank, is_flat=True)
    seen: list[list[int]] = []

    def note(index: int, trained: Trained) -> None:
        gradients = [p.grad for p in trained.model.parameters()]
        seen.append([local_part(g).data_ptr() for g in gradients if g is not None])

    for index in range(4):
        trained.step(index, note)
    assert seen[1] == seen[2] == seen[3]


@pytest.mark.parametrize("fused", [False, True])
@ranks(2)
def test_a_gradient_scaler_scales_and_skips(rank: int, size: int, fused: bool) -> None:
    pair = [
        Trained(lambda p: AdamW(p, fused=fused), rank, is_flat=is_flat) for is_flat in (False, True)
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in pair]
    for index in range(4):
        for trained, scaler in zip(pair, scalers, strict=True):
            loss = loss_of(trained.model, tokens_for(index, rank))
            scaler.scale(loss * (float("inf") if index == 2 else 1.0)).backward()
            scaler.step(trained.optimizer)
            scaler.update()
            trained.optimizer.zero_grad()
        assert_same(*pair)
    assert scalers[0].get_scale() == scalers[1].get_scale()


@ranks(2)
def test_torchs_state_dicts(rank: int, size: int) -> None:
    """``set_optimizer_state_dict`` makes a step with zeros first, and loads in place."""
    pair = [Trained(EVERY["AdamW"], rank, is_flat=is_flat) for is_flat in (False, True)]
    for trained in pair:
        for index in range(2):
            trained.step(index)
    saved: list[Any] = [get_optimizer_state_dict(t.model, t.optimizer) for t in pair]
    assert saved[0]["state"].keys() == saved[1]["state"].keys()
    fresh = Trained(EVERY["AdamW"], rank, is_flat=True)
    with torch.no_grad():
        for one, other in zip(fresh.model.parameters(), pair[1].model.parameters(), strict=True):
            one.copy_(other)
    set_optimizer_state_dict(fresh.model, fresh.optimizer, copy.deepcopy(saved[0]))
    for index in range(2, 4):
        assert fresh.step(index) == pair[0].step(index)
    assert_same(pair[0], fresh)


@ranks(2)
def test_checkpoints(rank: int, size: int, tmp_path: Path) -> None:
    theirs, ours = (Trained(EVERY["AdamW"], rank, is_flat=f) for f in (False, True))
    for index in range(2):
        theirs.step(index)
        ours.step(index)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, TrainingState(ours.model, [ours.optimizer]))
    fresh = Trained(EVERY["AdamW"], rank, is_flat=True)
    checkpoints.load(TrainingState(fresh.model, [fresh.optimizer]))
    for index in range(2, 4):
        assert theirs.step(index) == fresh.step(index)
    assert_same(theirs, fresh)


@ranks(2)
def test_attached_optimizers(rank: int, size: int) -> None:
    trained = Trained(EVERY["AdamW"], rank, is_flat=True)
    attach_optimizer(trained.optimizer)
    trained.step(0)
    saved = copy.deepcopy(trained.optimizer.state_dict())
    trained.optimizer.load_state_dict(saved)
    trained.step(1)


class Scalars(nn.Module):
    """A 0-dim parameter, which steps apart, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.row = nn.Parameter(torch.ones(1, 8))
        self.matrix = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix * self.scale + self.row


@pytest.mark.parametrize("fused", [False, True])
@ranks(2)
def test_empty_and_0_dim_parameters(rank: int, size: int, fused: bool) -> None:
    finals = []
    for is_flat in (False, True):
        model: Any = Scalars()
        fully_shard(model)
        optimizer = AdamW(model.parameters(), lr=0.1, fused=fused)
        if is_flat:
            flat(optimizer)
        for index in range(3):
            model(torch.full((2, 8), 1.0 + rank + index)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[p] for p in model.parameters()]
        assert [s["step"].item() for s in states] == [3.0] * 3
        finals.append([full(p) for p in model.parameters()])
    for one, other in zip(*finals, strict=True):
        assert torch.equal(one, other)
