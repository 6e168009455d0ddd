"""The engine's own answers to hooks and seams: they count where no plugin gives one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from typing_extensions import override

from polyshard.__about__ import __version__
from polyshard._torch.fsdp1 import chunk_sharded_tensor, local_shards
from polyshard.errors import PluginError
from polyshard.plugins.contract import Plugin, hookimpl
from polyshard.plugins.seams import (
    CollectivesBackend,
    GatherCodec,
    GradientLanding,
    GroupInfo,
    ReduceCodec,
    ShardStorage,
    StorageFactory,
)
from polyshard.sharding.layout import GroupLayout
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Transport, choose_transport


class EnginePlugin(Plugin):
    """Lowest in priority: its answers count only where no plugin has one.

    What it answers to exclusive hooks about groups stands in :mod:`polyshard.plugins.roles`.
    """

    name = "engine"
    version = __version__

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


class NativeGatherCodec(GatherCodec):
    """Parameters travel as they are, cast to the parameter dtype, straight into their regions."""

    name = "native"

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> None:
        """The engine's own transfer needs no codec."""
        del group, layout


class NativeReduceCodec(ReduceCodec):
    """Gradients travel from where autograd wrote them and are summed in the reduce dtype."""

    name = "native"

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> None:
        """The engine's own transfer needs no codec."""
        del group, layout


class ShardLanding(GradientLanding):
    """Every gradient lands on shards."""

    name = "shards"

    @override
    def owners(self, group: GroupInfo) -> list[None]:
        return [None] * len(group.parameters)


class DeviceStorage(ShardStorage):
    """The shard rests on the compute device; every step of its life cycle is immediate."""

    def __init__(self) -> None:
        self._shard: Tensor | None = None

    @override
    def rest(self, shard: Tensor) -> Tensor:
        self._shard = shard
        return shard

    @override
    def view(self) -> Tensor:
        assert self._shard is not None
        return self._shard

    @override
    def fetch(self) -> None:
        """It is here already."""


class DeviceStorageFactory(StorageFactory):
    """Shards rest on the compute device."""

    name = "device"

    @override
    def create(self, group: GroupInfo, layout: GroupLayout) -> DeviceStorage:
        del group, layout
        return DeviceStorage()


class DefaultBackend(CollectivesBackend):
    """Point-to-point on gloo, coalesced collectives on NCCL, plain collectives elsewhere."""

    name = "default"

    @override
    def connect(self, roles: MeshRoles, device: torch.device) -> Transport:
        return choose_transport(roles, device)
