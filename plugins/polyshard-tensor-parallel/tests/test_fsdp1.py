"""FSDP1 over tensor parallelism: our plugin through the bridge against torch's own extension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from tp_models import mean_over, meshes, mlp, mlp_plan, train

from polyshard.fsdp1 import as_fsdp_extensions, wrapping_with
from polyshard_tensor_parallel import TensorParallel
from polyshard_testing import World, ranks

WIDTH = 8


def regression(model: nn.Module, tokens: Tensor) -> Tensor:
    x = tokens.float().flatten()[: 3 * WIDTH].view(3, WIDTH) / 128 - 1
    out: Tensor = model(x).square().mean()
    return out


def wrapped(rank: int, ours: bool, original: bool, hidden: int = 12) -> Any:
    mesh = meshes(2, 2)
    model = mlp(width=WIDTH, hidden=hidden)
    parallelize_module(model, mesh["tp"], mlp_plan())
    kwargs: dict[str, Any] = {
        "device_mesh": mesh["dp"],
        "use_orig_params": original,
        "sharding_strategy": ShardingStrategy.FULL_SHARD,
        "device_id": torch.get_default_device(),
    }
    if not ours:
        return FullyShardedDataParallel(model, **kwargs)
    with wrapping_with(as_fsdp_extensions([TensorParallel(mesh=mesh["tp"])])):
        return FullyShardedDataParallel(model, **kwargs)


def plain(value: Any) -> Tensor:
    """All of a value of a state dict, in whatever form it comes."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, ShardedTensor):
        shard = value.local_shards()[0].tensor
        if isinstance(shard, ShardedTensor):
            shard = shard.local_shards()[0].tensor
        value = shard
    found: Tensor = value.detach().clone()
    return found


KINDS: dict[str, Any] = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig),
}


def kind_of(kind: str) -> tuple[StateDictType, Any]:
    """With a config of its own: FSDP1 writes into the one it is given."""
    which, config = KINDS[kind]
    return which, config()


def state_of(model: Any, kind: str) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, *kind_of(kind)):
        found: dict[str, Any] = model.state_dict()
        return found


def load_into(model: Any, kind: str, state: dict[str, Any]) -> None:
    with FullyShardedDataParallel.state_dict_type(model, *kind_of(kind)):
        model.load_state_dict(state)


def trains(rank: int, size: int, original: bool) -> tuple[list[float], list[float]]:
    found = []
    for ours in (True, False):
        model = wrapped(rank, ours, original)
        curve = train(model, [rank // 2], 3, loss=regression, clip=1e9)
        found.append(curve.losses)
    return found[0], found[1]


@pytest.mark.parametrize("original", [True, False], ids=["original params", "flat params"])
def test_losses_are_those_of_torch(world4: World, original: bool) -> None:
    found = world4.run(trains, original)
    for ours, theirs in found:
        assert ours == theirs
    expected = train(mlp(width=WIDTH), range(2), 3, loss=regression, clip=1e9)
    losses = mean_over([found[0][0], found[2][0]])
    torch.testing.assert_close(losses, expected.losses, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@ranks(4)
def test_state_dicts_are_those_of_torch(rank: int, size: int, kind: str) -> None:
    ours, theirs = (wrapped(rank, mine, True) for mine in (True, False))
    for model in (ours, theirs):
        train(model, [rank // 2], 2, loss=regression, clip=1e9)
    found, expected = state_of(ours, kind), state_of(theirs, kind)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        assert torch.equal(plain(found[name]), plain(value)), name
    other = wrapped(rank, True, True)
    load_into(other, kind, found)
    for name, value in state_of(other, kind).items():
        assert torch.equal(plain(value), plain(expected[name])), name


@ranks(4)
def test_optimizer_state_is_that_of_torch(rank: int, size: int) -> None:
    states = []
    for ours in (True, False):
        model = wrapped(rank, ours, True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        regression(model, torch.arange(40)).backward()
        optimizer.step()
        with FullyShardedDataParallel.state_dict_type(model, *kind_of("sharded")):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
            optimizer.load_state_dict(loaded)
        states.append(state["state"])
    assert states[0].keys() == states[1].keys()
    for name, values in states[1].items():
        for key, value in values.items():
            assert torch.equal(plain(states[0][name][key]), plain(value)), (name, key)


@ranks(4)
def test_sharded_tensors_are_nested_in_state_dicts(rank: int, size: int) -> None:
    """Given a process group, FSDP1 saves sharded tensors: nested where the plan takes part."""
    mesh = meshes(2, 2)
    model = mlp(width=WIDTH)
    parallelize_module(model, mesh["tp"], mlp_plan())
    parts = {n: p.to_local().clone() for n, p in model.named_parameters() if isinstance(p, DTensor)}
    with wrapping_with(as_fsdp_extensions([TensorParallel(mesh=mesh["tp"])])):
        outer: Any = FullyShardedDataParallel(
            model,
            process_group=mesh["dp"].get_group(),
            use_orig_params=True,
            device_id=torch.get_default_device(),
        )
    at = mesh["dp"].get_local_rank()
    for name, value in state_of(outer, "sharded").items():
        assert isinstance(value, ShardedTensor), name
        inner = isinstance(value.local_shards()[0].tensor, ShardedTensor)
        assert inner is (name in parts), name
        if inner:
            assert torch.equal(plain(value), parts[name].chunk(2)[at]), name
