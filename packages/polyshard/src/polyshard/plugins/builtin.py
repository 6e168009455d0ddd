"""The engine's own specs and parts, which it uses where no plugin provides one."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

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


class NativeCodec(GatherCodec, ReduceCodec):
    """Sends parameters in the parameter dtype and gradients from where autograd wrote them.

    Gradients are summed in the reduce dtype.
    """

    name = "native"

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> None:
        """The engine's own transfers need no codec."""


class ShardLanding(GradientLanding):
    """Scatters every gradient to shards."""

    name = "shards"

    @override
    def owners(self, group: GroupInfo) -> list[None]:
        return [None] * len(group.parameters)


class DeviceStorage(ShardStorage):
    """Keeps the shard on the compute device; no method has to copy or wait."""

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
        """Do nothing: the shard is on the compute device."""


class DeviceStorageFactory(StorageFactory):
    """Keeps shards on the compute device."""

    name = "device"

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> DeviceStorage:
        return DeviceStorage()


class DefaultBackend(CollectivesBackend):
    """Point-to-point on gloo, coalesced collectives on NCCL, plain collectives elsewhere."""

    name = "default"

    @override
    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        return choose_transport(roles, group.device)
