"""The engine's own answers to the seams; a plugin's answer takes their place."""

from __future__ import annotations

import torch
from torch import Tensor

from polyshard.layout import GroupLayout
from polyshard.mesh import MeshRoles
from polyshard.seams import GroupInfo
from polyshard.transport import Transport, choose_transport


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
