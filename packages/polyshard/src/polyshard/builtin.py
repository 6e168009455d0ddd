"""The engine's own behaviour as the plugin that answers when nobody else does."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from polyshard.__about__ import __version__
from polyshard._torch_fsdp1 import chunk_sharded_tensor, local_shards
from polyshard.contract import Plugin
from polyshard.defaults import (
    DefaultBackend,
    DeviceStorageFactory,
    NativeGatherCodec,
    NativeReduceCodec,
)
from polyshard.errors import PluginError
from polyshard.markers import hookimpl
from polyshard.seams import GroupInfo


class EnginePlugin(Plugin):
    """Lowest in priority: its answers to exclusive hooks count only if they are the only ones."""

    name = "engine"
    version = __version__

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> DeviceStorageFactory:
        """Shards rest on the compute device."""
        del group
        return DeviceStorageFactory()

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> DefaultBackend:
        """Point to point on gloo, collectives elsewhere."""
        del group
        return DefaultBackend()

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> NativeGatherCodec:
        """Parameters travel as they are."""
        del group
        return NativeGatherCodec()

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> NativeReduceCodec:
        """Gradients travel as they are."""
        del group
        return NativeReduceCodec()

    @hookimpl
    def chunk_tensor(
        self,
        tensor: Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
    ) -> Tensor:
        """Cut on dim 0, as FSDP1 does."""
        # A ShardedTensor takes contiguous shards only; a plugin may have unflattened into a view.
        whole = tensor.contiguous()
        return chunk_sharded_tensor(whole, rank, world_size, num_devices_per_node, pg)

    @hookimpl
    def chunk_dtensor(self, tensor: Tensor, device_mesh: DeviceMesh) -> DTensor:
        """Shard dim 0 over the last axis and repeat over the others; scalars are repeated."""
        placements: list[Placement] = [Replicate()] * device_mesh.ndim
        if tensor.ndim:
            placements[-1] = Shard(0)
        # Every rank holds the whole tensor already, so each cuts its own part.
        return distribute_tensor(tensor.detach(), device_mesh, placements, src_data_rank=None)

    @hookimpl
    def all_gather_dtensor(self, tensor: DTensor) -> Tensor:
        """Gather every axis."""
        whole = [Replicate()] * tensor.device_mesh.ndim
        return tensor.redistribute(placements=whole).to_local()

    @hookimpl
    def pre_load_state_dict_transform(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """The tensor itself with its shards."""
        shards = local_shards(tensor)
        if shards is None:
            raise PluginError(
                f"a sharded state dict holds a {type(tensor).__name__} where a ShardedTensor was "
                "expected; load a state dict of the type that was saved."
            )
        return tensor, shards
