"""Shards that stay on the device, whose gradients are stepped as soon as they are reduced."""

from __future__ import annotations

from typing_extensions import override

from polyshard.plugins.builtin import DeviceStorage, DeviceStorageFactory
from polyshard.plugins.seams import GroupInfo
from polyshard.sharding.layout import GroupLayout


class HoldingStorage(DeviceStorage):
    """The engine's own storage, but gradients come once: after the last backward of an iteration.

    Otherwise ``set_is_last_backward(False)`` would give each part of their sum to the optimizer.
    """

    holds_gradients = True


class HoldingStorageFactory(DeviceStorageFactory):
    """Makes the storage of one group."""

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> HoldingStorage:
        del group, layout
        return HoldingStorage()
