"""Options of ``fully_shard`` that a row of the benchmark may turn on, for both engines alike."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

MODES = ("plain", "keep", "blocks", "hsdp", "columns", "accumulate")
"""Freed after forward; kept until backward; kept by blocks of half the ranks; two replicas;
matrices sharded on dim 1; two micro-batches, the first without communication."""


def options_of(mode: str) -> dict[str, Any]:
    """Keywords of ``fully_shard`` for ``mode``; called on the ranks.

    Raises:
        ValueError: for a mode that is not one of :data:`MODES`.
    """
    if mode in ("plain", "accumulate"):
        return {}
    if mode == "keep":
        return {"reshard_after_forward": False}
    if mode == "blocks":
        return {"reshard_after_forward": dist.get_world_size() // 2}
    if mode == "hsdp":
        shape = (2, dist.get_world_size() // 2)
        return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))}
    if mode == "columns":
        return {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    raise ValueError(f"mode '{mode}' is none of {', '.join(MODES)}")
