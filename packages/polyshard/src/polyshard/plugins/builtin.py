"""The engine's own answers to hooks and seams: they count where no plugin gives one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from polyshard.__about__ import __version__
from polyshard._torch.fsdp1 import chunk_sharded_tensor, local_shards
from polyshard.errors import PluginError
from polyshard.plugins.contract import Plugin, hookimpl
from polyshard.seams import GroupInfo
from polyshard.sharding.layout import GroupLayout
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Transport, choose_transport


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


class NativeGatherCodec:
    """Parameters travel as they are, cast to the parameter dtype, straight into their regions."""

    name = "native"
    settings = ""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> None:
        """Nothing to prepare: the engine's own transfer needs no codec."""
        del group, layout


class NativeReduceCodec:
    """Gradients travel from where autograd wrote them and are summed in the reduce dtype."""

    name = "native"
    settings = ""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> None:
        """Nothing to prepare: the engine's own transfer needs no codec."""
        del group, layout


class DeviceStorage:
    """The shard rests on the compute device; every step of its life cycle is immediate."""

    def __init__(self) -> None:
        """Nothing rests here yet."""
        self._shard: Tensor | None = None

    def rest(self, shard: Tensor) -> Tensor:
        """Keep ``shard`` where it is."""
        self._shard = shard
        return shard

    def prefetch(self) -> None:
        """Already here."""

    def view(self) -> Tensor:
        """The shard itself."""
        assert self._shard is not None
        return self._shard

    def fetch(self) -> None:
        """Already here."""

    def release(self) -> None:
        """It stays."""

    def place_gradient(self, gradient: Tensor) -> Tensor:
        """Gradients rest on the device too."""
        return gradient


class DeviceStorageFactory:
    """Shards rest on the compute device."""

    name = "device"
    settings = ""

    def create(self, group: GroupInfo, layout: GroupLayout) -> DeviceStorage:
        """A storage for one group."""
        del group, layout
        return DeviceStorage()


class DefaultBackend:
    """Point-to-point on gloo, coalesced collectives on NCCL, plain collectives elsewhere."""

    name = "default"
    settings = ""

    def connect(self, roles: MeshRoles, device: torch.device) -> Transport:
        """See :func:`polyshard.transport.choose_transport`."""
        return choose_transport(roles, device)


class SilentObserver:
    """An observer that looks away; subclass it and override what should be seen."""

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        """An all-gather starts."""

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        """The unsharded parameters are ready."""

    def on_reshard(self, group: str) -> None:
        """The unsharded parameters were freed."""

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        """A gradient reduction starts."""

    def on_reduced(self, group: str, wait_seconds: float) -> None:
        """The sharded gradients are in place."""

    def on_step_end(self) -> None:
        """All gradients of this step are in place."""
