"""The ``ShardedTensor`` forms of FSDP1's state dicts, where tensor parallelism takes part.

A parameter that tensor parallelism cut becomes a ``ShardedTensor`` over the model axis whose one
local shard is another ``ShardedTensor``, over FSDP's ranks: boxes and shards as torch's
``DTensorExtensions`` makes them. torch lists every other shard under one neighbour, by its rank
in the group, and so fails where the group does not start at rank 0; here each is listed under the
rank that holds it. All private names of torch's sharded tensors are in this file.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from polyshard.errors import UnsupportedError
from polyshard_tensor_parallel._torch_private import local_tensor, waited
from polyshard_tensor_parallel.forms.strides import chunk_length


def chunk(
    tensor: Tensor, rank: int, world_size: int, devices_per_node: int, group: dist.ProcessGroup
) -> ShardedTensor | None:
    """Rank ``rank``'s part of ``tensor`` over ``group``; ``None`` for a plain tensor."""
    if isinstance(tensor, ShardedTensor):
        inner = _inner(tensor.local_tensor(), rank, world_size, devices_per_node, group)
        shard = Shard(inner, copy.deepcopy(tensor.local_shards()[0].metadata))
        metadata = copy.deepcopy(tensor.metadata())
        metadata.tensor_properties.requires_grad = False
        return _outer(shard, metadata, tensor._process_group)
    if not isinstance(tensor, DTensor):
        return None
    if tensor.device_mesh.ndim != 1:
        raise UnsupportedError(
            f"a ShardedTensor of a parameter on {tensor.device_mesh} cannot be made: FSDP1 takes "
            "one model axis. Use polyshard.fully_shard, whose sharded parameters are DTensors."
        )
    inner = _inner(waited(local_tensor(tensor)), rank, world_size, devices_per_node, group)
    metadata = _metadata(tensor)
    at = tensor.device_mesh.get_local_rank() if len(metadata.shards_metadata) > 1 else 0
    shard = Shard(inner, copy.deepcopy(metadata.shards_metadata[at]))
    return _outer(shard, metadata, tensor.device_mesh.get_group())


def inner_shards(tensor: Tensor) -> tuple[Tensor, list[Any]] | None:
    """The inner ``ShardedTensor`` of a nested one, and its shards; ``None`` for anything else."""
    if not isinstance(tensor, ShardedTensor):
        return None
    shards = tensor.local_shards()
    if len(shards) != 1 or not isinstance(shards[0].tensor, ShardedTensor):
        return None
    inner = shards[0].tensor
    return inner, inner.local_shards()


def _inner(
    local: Tensor, rank: int, world_size: int, devices_per_node: int, group: dist.ProcessGroup
) -> ShardedTensor:
    """FSDP1's own cut, on dim 0."""
    return _create_chunk_sharded_tensor(local, rank, world_size, devices_per_node, group)


def _outer(
    shard: Shard, metadata: ShardedTensorMetadata, group: dist.ProcessGroup
) -> ShardedTensor:
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [shard], sharded_tensor_metadata=metadata, process_group=group, init_rrefs=False
    )


def _metadata(tensor: DTensor) -> ShardedTensorMetadata:
    """Metadata of every shard over the model axis; one that all ranks hold is this rank's."""
    group = tensor.device_mesh.get_group()
    boxes = _boxes(tensor)
    shards = []
    for at, (offsets, sizes) in enumerate(boxes):
        owner = dist.get_global_rank(group, at) if len(boxes) > 1 else dist.get_rank()
        placement = f"rank:{owner}/{local_tensor(tensor).device}"
        shards.append(ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=placement))
    return ShardedTensorMetadata(
        shards_metadata=shards,
        size=tensor.size(),
        tensor_properties=TensorProperties(
            dtype=tensor.dtype, layout=tensor.layout, requires_grad=False
        ),
    )


def _boxes(tensor: DTensor) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of each rank's part, in elements; one box if all hold the same."""
    placement = tensor.placements[0]
    whole = list(tensor.size())
    if not isinstance(placement, ShardPlacement):
        return [([0] * len(whole), whole)]
    dim, world_size = placement.dim, tensor.device_mesh.size()
    boxes, start = [], 0
    for at in range(world_size):
        offsets, sizes = [0] * len(whole), list(whole)
        offsets[dim], sizes[dim] = start, chunk_length(whole[dim], world_size, at)
        start += sizes[dim]
        boxes.append((offsets, sizes))
    return boxes
