"""Calls of ``fully_shard`` that are refused: a clear error on every rank, and nothing lost."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from toy_entry_points import only
from toy_planning import Constrained
from toy_refusals import refused

from polyshard import DataParallelMeshDims, ShardPlacement, fully_shard
from polyshard.errors import (
    AlreadyShardedError,
    MeshError,
    ModuleError,
    PolyshardError,
    SettingError,
    UnsupportedError,
)
from polyshard_testing import World, ranks


@ranks(2)
def test_bad_modules(rank: int, size: int) -> None:
    refused(ModuleError, r"no parameters", fully_shard, nn.ReLU())
    refused(ModuleError, r"ModuleList", fully_shard, nn.ModuleList([nn.Linear(2, 2)]))
    refused(SettingError, r"empty list", fully_shard, [])
    refused(SettingError, r"takes modules, got int", fully_shard, 3)
    module = fully_shard(nn.Linear(2, 2))
    with pytest.raises(AssertionError, match="once"):  # what torch raises
        fully_shard(module)
    refused(AlreadyShardedError, r"Linear already", fully_shard, module)
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    sharded = nn.Linear(4, 4)
    sharded.weight = nn.Parameter(distribute_tensor(sharded.weight.detach(), mesh, [Shard(0)]))
    with pytest.MonkeyPatch.context() as patch:
        only(patch, ())
        refused(UnsupportedError, r"'weight' is a DTensor.*tensor-parallel", fully_shard, sharded)


@ranks(2)
def test_a_refused_call_changes_nothing(rank: int, size: int) -> None:
    """A refused call leaves the module as it was: trained like any other, and shardable."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(4, 4))
            self.b = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.a).sum() + self.b.float().sum()

    model = Two()
    before = dict(model.named_parameters())
    for kwargs in ({"shard_placement_fn": lambda p: Shard(1)}, {"plugins": [Constrained(3)]}):
        with pytest.raises(PolyshardError):
            fully_shard(model, **kwargs)
        assert all(p is before[name] for name, p in model.named_parameters())
        assert type(model) is Two
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
    fully_shard(model)
    model(torch.ones(4, 4)).backward()
    assert all(p.grad is not None for p in model.parameters())


@ranks(4)
def test_bad_settings(rank: int, size: int) -> None:
    def call(**kwargs: Any) -> None:
        fully_shard(nn.Linear(4, 4), **kwargs)

    text: Any = "dp"
    with patch("polyshard.plugins.discovery.installed_plugins", return_value=[]):
        refused(UnsupportedError, r"polyshard-offload", call, offload_policy=CPUOffloadPolicy())
    refused(UnsupportedError, r"not known to polyshard", call, offload_policy="cpu")
    refused(MeshError, r"names \['a'\]", call, dp_mesh_dims=DataParallelMeshDims(shard="a"))
    refused(SettingError, r"takes a DataParallelMeshDims, got str", call, dp_mesh_dims="dp")
    refused(SettingError, r"must divide", call, reshard_after_forward=3)
    refused(SettingError, r"None, a bool or an int", call, reshard_after_forward="yes")
    refused(SettingError, r"'bias', which has 1 dims", call, shard_placement_fn=lambda p: Shard(1))
    refused(SettingError, r"returned 'x' for", call, shard_placement_fn=lambda p: "x")
    refused(
        MeshError,
        r"for 'weight': mesh must be a DeviceMesh",
        call,
        shard_placement_fn=lambda p: ShardPlacement(Shard(0), text),
    )
    module: Any = fully_shard(nn.Linear(4, 4))
    refused(SettingError, r"takes True or False, got int", module.set_reshard_after_forward, 2)
    refused(SettingError, r">= 1", module.set_reduce_scatter_max_input_buffers, 0)
    refused(SettingError, r"got Linear", module.set_modules_to_forward_prefetch, [nn.Linear(1, 1)])
    refused(SettingError, r"needs allocate.*got int", module.set_custom_all_gather, 3)


@ranks(4)
def test_bad_meshes(rank: int, size: int) -> None:
    def call(mesh: Any) -> None:
        fully_shard(nn.Linear(4, 4), mesh=mesh)

    refused(
        MeshError,
        r"1D mesh.*2D mesh",
        call,
        init_device_mesh(torch.get_default_device().type, (2, 2, 1)),
    )
    refused(
        MeshError,
        r"names for its axes",
        call,
        init_device_mesh(torch.get_default_device().type, (2, 2)),
    )
    refused(MeshError, r"must be a DeviceMesh, got int", call, 3)
    part = DeviceMesh(torch.get_default_device().type, [0, 1])
    if rank < 2:
        call(part)
    else:
        refused(MeshError, rf"rank {rank} of 4 is not part of", call, part)


def trained_in_two_lives(rank: int, size: int) -> None:
    """The second mesh equals the first, by which torch would find groups that are gone."""
    kind = torch.get_default_device().type
    for groups_before in (3, 0):  # so that the second life has no group of that name
        for _ in range(groups_before):
            dist.new_group(list(range(size)))
        mesh = init_device_mesh(kind, (2, size // 2), mesh_dim_names=("replica", "shard"))
        model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
        wanted = torch.full((4, 4), 2.0)
        assert torch.equal(model.weight.grad.full_tensor(), wanted)
        options = StateDictOptions(full_state_dict=True)
        found = get_model_state_dict(model, options=options)
        assert rank or set(found) == {"weight", "bias"}
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        dist.destroy_process_group()
        if groups_before:
            store = dist.PrefixStore("again", store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def test_process_groups_may_be_destroyed_and_made_anew() -> None:
    world = World(4)
    try:
        world.run(trained_in_two_lives)
    finally:
        world.close()


def mesh_of_a_dead_group(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    dist.destroy_process_group()
    refused(MeshError, r"is gone.*init_process_group", fully_shard, nn.Linear(2, 2), mesh=mesh)


def test_mesh_of_a_dead_group() -> None:
    world = World(2)
    try:
        world.run(mesh_of_a_dead_group)
    finally:
        world.close()
