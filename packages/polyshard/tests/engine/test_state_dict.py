"""State dicts and distributed checkpoints, at any moment and any world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from toy_models import Model, assert_same_parameters, build, full, loss_of, shard, tokens_for, train

from polyshard import fully_shard
from polyshard_testing import World, ranks


@ranks(2)
def test_state_dict_at_any_moment(rank: int, size: int) -> None:
    model, reference = shard(build(), fully_shard), build()
    before = model.state_dict()
    loss_of(model, tokens_for(0, rank))  # the root is unsharded now
    after = model.state_dict()
    assert list(before) == list(after) == list(reference.state_dict())
    for name, value in after.items():
        assert isinstance(value, DTensor)
        assert value.placements == (Shard(0),)
        assert torch.equal(value.full_tensor(), reference.state_dict()[name])
    train(model, [tokens_for(s, rank) for s in range(2)])
    live: dict[str, Any] = dict(model.named_parameters())
    for name, value in before.items():
        assert torch.equal(value.to_local(), live[name].detach().to_local()), "a cached one aliases"


@ranks(2)
def test_load_state_dict(rank: int, size: int) -> None:
    source, target = shard(build(1), fully_shard), shard(build(2), fully_shard)
    loss_of(target, tokens_for(0, rank)).backward()
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    target.load_state_dict(source.state_dict())
    assert_same_parameters(target, source, exact=True)
    optimizer.step()  # it holds the parameters that were loaded into
    with pytest.raises(AssertionError):
        assert_same_parameters(target, source, exact=True)
    partial = source.state_dict()
    del partial["head.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight"):
        target.load_state_dict(partial)
    assert target.load_state_dict(partial, strict=False).missing_keys == ["head.weight"]
    assigned = shard(build(3), fully_shard)
    assigned.load_state_dict({k: v.clone() for k, v in source.state_dict().items()}, assign=True)
    again = torch.optim.SGD(assigned.parameters(), lr=0.1)
    loss_of(assigned, tokens_for(1, rank)).backward()
    twin = shard(build(1), fully_shard)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    loss_of(twin, tokens_for(1, rank)).backward()
    again.step()
    twin_optimizer.step()
    assert_same_parameters(assigned, twin, exact=True)


def trained(model: nn.Module, size: int, rank: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, tokens_for(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def save(rank: int, size: int, folder: str, engine: str) -> None:
    model = shard(build(hidden=251), fully_shard if engine == "polyshard" else torch_fully_shard)
    optimizer = trained(model, size, rank)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)


def load(rank: int, size: int, folder: str, engine: str) -> None:
    reference = build(hidden=251)
    reference_optimizer = trained(reference, 1, 0)
    model = shard(build(9, hidden=251), fully_shard if engine == "polyshard" else torch_fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_same_parameters(model, reference, exact=False)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for a, b in pairs:
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                full(optimizer.state[a][key]),
                reference_optimizer.state[b][key],
                rtol=1e-3,
                atol=1e-6,
            )


@pytest.mark.parametrize(
    ("saver", "loader"),
    [("polyshard", "polyshard"), ("torch", "polyshard"), ("polyshard", "torch")],
)
def test_checkpoints_load_at_other_world_sizes(
    world2: World, world3: World, world4: World, tmp_path: Path, saver: str, loader: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    world2.run(save, folder, saver)
    for world in (world2, world3, world4):
        world.run(load, folder, loader)


def to_one_rank(rank: int, size: int, folder: str) -> None:
    load(rank, size, folder, "polyshard")


def test_checkpoint_of_four_loads_on_one(world1: World, world4: World, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    world4.run(save, folder, "polyshard")
    world1.run(to_one_rank, folder)


@ranks(2)
def test_full_state_dicts(rank: int, size: int) -> None:
    model = shard(build(1), fully_shard)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    reference: Model = build(1)
    if rank:
        assert state == {}
    else:
        for name, value in reference.state_dict().items():
            assert torch.equal(state[name], value.cpu())
    other = shard(build(2), fully_shard)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    source: dict[str, Any] = dict(reference.state_dict()) if rank == 0 else {}
    set_model_state_dict(other, source, options=options)
    assert_same_parameters(other, reference, exact=True)
