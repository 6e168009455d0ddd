"""Where shards rest, and how bytes move: a storage and a backend."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from polyshard import Plugin, hookimpl
from polyshard.plugins.builtin import DefaultBackend, DeviceStorage
from polyshard.plugins.seams import GroupInfo, StorageFactory
from polyshard.sharding.layout import GroupLayout
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Transport


class Away(DeviceStorage):
    """Keeps the shard elsewhere and brings it to a buffer of its own for each gather."""

    def __init__(self) -> None:
        super().__init__()
        self.fetches = 0

    def rest(self, shard: Tensor) -> Tensor:
        self._view = torch.full_like(shard, float("nan"))
        return super().rest(shard)

    def view(self) -> Tensor:
        return self._view

    def fetch(self) -> None:
        self.fetches += 1
        self._view.copy_(super().view())

    def release(self) -> None:
        self._view.fill_(float("nan"))


class AwayFactory(StorageFactory):
    name = "away"
    settings = ""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Away:
        return Away()


class SlowBackend(DefaultBackend):
    """The default transport under another name."""

    name = "slow"

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        transport = super().bind(group, roles)
        transport.name = "slow"
        return transport


class Resting(Plugin):
    """Claims the storage and the collectives."""

    name = "resting"

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> AwayFactory:
        return AwayFactory()

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> SlowBackend:
        return SlowBackend()


class Eager(DeviceStorage):
    """Rests in a copy; what is prefetched is what was there at that moment."""

    def __init__(self, log: list[str], name: str, units: int) -> None:
        super().__init__()
        self.prefetch_units = units
        self._log, self._name = log, name
        self._near = False

    @override
    def rest(self, shard: Tensor) -> Tensor:
        self._resting = shard.clone()
        super().rest(shard)
        return self._resting

    @override
    def prefetch(self) -> None:
        self._log.append(f"prefetch {self._name}")
        self.view().copy_(self._resting)
        self._near = True

    @override
    def fetch(self) -> None:
        self._log.append(f"fetch {self._name}" + (" (near)" if self._near else ""))
        if not self._near:
            self.view().copy_(self._resting)
        self._near = False

    @override
    def release(self) -> None:
        self._log.append(f"release {self._name}")
        self.view().fill_(float("nan"))
        self._near = False


class EagerFactory(StorageFactory):
    name, settings = "eager", ""

    def __init__(self, log: list[str], units: int) -> None:
        self._log, self._units, self._count = log, units, 0

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Eager:
        self._count += 1
        return Eager(self._log, str(self._count), self._units)


class EagerPlugin(Plugin):
    name = "eager"

    def __init__(self, units: int) -> None:
        self.log: list[str] = []
        self._factory = EagerFactory(self.log, units)

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> EagerFactory:
        return self._factory
