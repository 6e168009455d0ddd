"""Replica groups with plugins: what these keep for a rank goes to its peers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves
from toy_replicas import ToyManager

from polyshard import fully_shard, plugin_state_dict
from polyshard.errors import UnsupportedError
from polyshard.plugins.seams import local_of
from polyshard_offload import Offload
from polyshard_optimizers import MatrixOptimizer
from polyshard_quantized import ErrorFeedback, Exclusions, Int8Block, QuantizedComm
from polyshard_resilience import Replicas
from polyshard_testing import ranks

PLUGINS: dict[str, Any] = {
    "quantized": lambda: QuantizedComm(
        gradients=Int8Block(),
        error_feedback=ErrorFeedback(),
        exclude=Exclusions(min_numel=0),
    ),
    "offload": Offload.cpu,
}


def sharded(seed: int, mesh: Any, plugin: object) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 8))
    fully_shard(model[0], mesh=mesh, plugins=[plugin])
    fully_shard(model, mesh=mesh, plugins=[plugin])
    return model


@ranks(4)
@pytest.mark.parametrize("name", PLUGINS)
def test_a_group_heals_with_plugins(rank: int, size: int, name: str) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("groups", "shards")
    )
    group = rank // 2
    model = sharded(group, mesh["shards"], PLUGINS[name]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = ToyManager(mesh["groups"], is_alone=True)
    replicas = Replicas(manager, model, optimizer)

    def step() -> None:
        with replicas.step() as under_way:
            rows = torch.Generator().manual_seed(10 * under_way.number + rank)
            model(torch.randn(4, 16, generator=rows)).square().mean().backward()
        assert under_way.committed

    def differs() -> float:
        """How far this group's shards, and what plugins keep, are from those of the first."""
        kept = [t for state in plugin_state_dict(model).values() for t in tensors_of(state)]
        assert bool(kept) == (name == "quantized")
        own = [local_of(p).detach().flatten().double().cpu() for p in model.parameters()]
        mine = torch.cat([*own, *(t.flatten().double().cpu() for t in kept)])
        first = mine.clone()
        source = dist.get_process_group_ranks(mesh.get_group("groups"))[0]
        dist.broadcast(first, source, group=mesh.get_group("groups"))
        return float((mine - first).abs().sum())

    for _ in range(2):
        step()
    assert (differs() > 0) == bool(group)
    manager.is_alone, manager.heals = False, {manager.begun + 1}
    with replicas.step() as healed:
        assert differs() == 0
        model(torch.ones(4, 16)).square().mean().backward()
    assert healed.committed
    assert differs() == 0, "both had the same batch"


def tensors_of(state: Any) -> list[torch.Tensor]:
    found: list[Any] = tree_leaves(state)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


@ranks(2)
def test_state_elsewhere_is_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (1, 2), mesh_dim_names=("groups", "shards")
    )
    manager = ToyManager(mesh["groups"])
    muon = MatrixOptimizer(torch.optim.Muon)
    model = sharded(0, mesh["shards"], muon)
    with pytest.raises(UnsupportedError, match="land whole on owners"):
        Replicas(manager, model)
    offload = Offload(optimizer="host")
    model = sharded(0, mesh["shards"], offload)
    optimizer = offload.wrap(torch.optim.AdamW(model.parameters()))
    with pytest.raises(UnsupportedError, match=r"keeps state outside of optimizer\.state"):
        Replicas(manager, model, optimizer)
