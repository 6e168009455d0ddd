"""A module whose parameters are on several meshes, or on none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from polyshard import ShardPlacement, fully_shard


def on_several_meshes(**more: nn.Parameter) -> Any:
    """On four ranks: uneven and empty shards, a mesh of its own, a replicated and a plain one."""
    pairs = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("a", "b"))
    module: Any = nn.Module()
    module.short = nn.Parameter(torch.ones(1, 3))
    module.wide = nn.Parameter(torch.ones(7, 3))
    module.expert = nn.Parameter(torch.ones(5, 2))
    module.whole = nn.Parameter(torch.ones(4))
    module.plain = nn.Parameter(torch.ones(3))
    for name, parameter in more.items():
        setattr(module, name, parameter)
    module.forward = lambda: sum(p.sum() for p in module.parameters())
    chosen = {
        id(module.expert): ShardPlacement(Shard(1), pairs["b"]),
        id(module.whole): Replicate(),
    }
    fully_shard(
        module, shard_placement_fn=lambda p: chosen.get(id(p)), ignored_params={module.plain}
    )
    return module
