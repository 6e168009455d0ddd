"""Private torch names around FSDP1's extension slot, used by the bridges only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_sharded_data_parallel
from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

__all__ = [
    "FSDPExtensions",
    "chunk_sharded_tensor",
    "local_shards",
    "set_extensions",
    "wrapping_with",
]


def chunk_sharded_tensor(
    tensor: Tensor, rank: int, world_size: int, devices_per_node: int, group: dist.ProcessGroup
) -> ShardedTensor:
    """FSDP1's own chunking on dim 0."""
    return _create_chunk_sharded_tensor(tensor, rank, world_size, devices_per_node, group)


def local_shards(tensor: Tensor) -> list[Any] | None:
    """Shards of a ``ShardedTensor`` on this rank; ``None`` for anything else."""
    return tensor.local_shards() if isinstance(tensor, ShardedTensor) else None


def set_extensions(module: nn.Module, extensions: FSDPExtensions) -> None:
    """Put ``extensions`` into the slots of every FSDP1 instance of ``module``."""
    for instance in FullyShardedDataParallel.fsdp_modules(module):
        instance._fsdp_extension = extensions
        if instance._handle is not None:
            instance._handle._fsdp_extension = extensions


@contextmanager
def wrapping_with(extensions: FSDPExtensions) -> Iterator[None]:
    """FSDP1 instances made in the block have ``extensions`` from the start.

    torch 2.13 decides in one function of the wrapper's module what goes into the slot; nothing
    reads the global that the documented setter writes.
    """
    name = "_init_extension"
    original = getattr(fully_sharded_data_parallel, name)

    def init_extension(state: Any, device_mesh: DeviceMesh | None = None) -> Any:
        original(state, device_mesh)
        state._fsdp_extension = extensions
        return state

    setattr(fully_sharded_data_parallel, name, init_extension)
    try:
        yield
    finally:
        setattr(fully_sharded_data_parallel, name, original)
