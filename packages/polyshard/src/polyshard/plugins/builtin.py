"""The engine's own specs and parts: they count where no plugin gives one."""

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


class NativeGatherCodec(GatherCodec):
    """Parameters travel as they are, cast to the parameter dtype, straight into their regions."""

    name = "native"

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> None:
        """The engine's own transfer needs no codec."""


class NativeReduceCodec(ReduceCodec):
    """Gradients travel from where autograd wrote them and are summed in the reduce dtype."""

    name = "native"

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> None:
        """The engine's own transfer needs no codec."""


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
    def bind(self, group: GroupInfo, layout: GroupLayout) -> DeviceStorage:
        return DeviceStorage()


class DefaultBackend(CollectivesBackend):
    """Point-to-point on gloo, coalesced collectives on NCCL, plain collectives elsewhere."""

    name = "default"

    @override
    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        return choose_transport(roles, group.device)
