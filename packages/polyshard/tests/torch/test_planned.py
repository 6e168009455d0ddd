"""Ranks that are only planned for: transports of real ones, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import describe, fully_shard
from polyshard._torch.planned import planned_ranks, stands_for
from polyshard.group.plan import GroupPlan
from polyshard_testing.world import World


def planned_bytes(rank: int, mesh_device: str = "meta") -> list[tuple[int, int]]:
    with planned_ranks(3, "gloo", rank):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(300, 301), nn.Linear(301, 7))
        mesh = init_device_mesh(mesh_device, (3,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return [(g.gather_bytes, g.reduce_bytes) for g in describe_all(model)]


def real_bytes(rank: int, size: int) -> list[tuple[int, int]]:
    del rank
    model = nn.Sequential(nn.Linear(300, 301), nn.Linear(301, 7))
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return [(g.gather_bytes, g.reduce_bytes) for g in describe_all(model)]


def describe_all(model: nn.Module) -> list[GroupPlan]:
    return [group for layer in model.children() for group in describe(layer).groups]


def test_names_of_backends() -> None:
    assert stands_for("fake-gloo") == "gloo"
    assert stands_for("gloo") is None
    assert stands_for("fake") is None


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_plans_are_those_of_real_ranks(world3: World, device: str) -> None:
    for rank, real in enumerate(world3.run(real_bytes)):
        assert planned_bytes(rank, device) == real


def test_transports_and_ends() -> None:
    for backend, name in (("gloo", "gloo-p2p"), ("nccl", "nccl-collectives")):
        with planned_ranks(4096, backend, rank=7):  # type: ignore[arg-type]
            assert (dist.get_rank(), dist.get_world_size()) == (7, 4096)
            with torch.device("meta"):
                layer = nn.Linear(8192, 8192)
            fully_shard(layer, mesh=init_device_mesh("meta", (4096,)))
            (group,) = describe(layer).groups
            assert group.roles.transport == name
            assert group.parameters[0].shape == (8192, 8192)
        assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="inside"), planned_ranks(2, "gloo"):
        raise RuntimeError("inside")
    assert not dist.is_initialized()
