"""The engine's own behaviour as the plugin that answers when nobody else does."""

from __future__ import annotations

from polyshard.__about__ import __version__
from polyshard.contract import Plugin
from polyshard.defaults import (
    DefaultBackend,
    DeviceStorageFactory,
    NativeGatherCodec,
    NativeReduceCodec,
)
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
