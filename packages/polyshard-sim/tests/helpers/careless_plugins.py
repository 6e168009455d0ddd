"""Plugins that use a device in right and in wrong ways; on the CPU all of them are right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from polyshard import Plugin, hookimpl
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import BoundGatherCodec, GatherCodec, GroupInfo, StorageFactory
from polyshard.sharding.layout import GroupLayout


class SideStreamCodec(BoundGatherCodec):
    """Encodes on a stream of its own."""

    def __init__(self, layout: GroupLayout, device: torch.device, waits: bool) -> None:
        self._layout, self._waits = layout, waits
        self.payload_bytes = 4 * sum(p.chunk_numel for p in layout.parameters)
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    @override
    def encode(self, shard: Tensor, payload: Tensor) -> None:
        if self._stream is None:
            self._encode(shard, payload)
            return
        current = torch.accelerator.current_stream()
        if self._waits:
            self._stream.wait_stream(current)
        with self._stream:
            self._encode(shard, payload)
        if self._waits:
            current.wait_stream(self._stream)

    def _encode(self, shard: Tensor, payload: Tensor) -> None:
        placed = self._layout.parameters
        parts = [shard[p.shard_offset : p.shard_offset + p.chunk_numel] for p in placed]
        payload.copy_(torch.cat(parts).view(torch.uint8))

    @override
    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        values, start = payloads.view(torch.float32), 0
        for placed, region in zip(self._layout.parameters, regions, strict=True):
            region.copy_(values[:, start : start + placed.chunk_numel])
            start += placed.chunk_numel


class SideStreams(GatherCodec):
    name, settings = "side-stream", ""

    def __init__(self, waits: bool) -> None:
        self._waits = waits
        self.settings = f"waits={waits}"

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> SideStreamCodec:
        return SideStreamCodec(layout, group.device, self._waits)


class Ordered(Plugin):
    """A codec whose stream and the caller's wait for each other."""

    name, waits = "ordered", True

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> SideStreams:
        return SideStreams(self.waits)


class Unordered(Ordered):
    """The same codec without a wait."""

    name, waits = "unordered", False


class PinnedPool:
    """Pinned memory that is used again once it was given back, and the copies from it have run."""

    def __init__(self, waits: bool) -> None:
        self._waits = waits
        self._free: list[tuple[Tensor, torch.Event | None]] = []

    def take(self, like: Tensor) -> Tensor:
        """Memory that no copy reads any more."""
        size = like.numel()
        for place, (memory, copied) in enumerate(self._free):
            if memory.numel() >= size:
                del self._free[place]
                if copied is not None:
                    copied.synchronize()
                return memory
        return torch.empty(max(size, 1 << 15), pin_memory=True, device="cpu")

    def give_back(self, memory: Tensor) -> None:
        """Have it, once what was launched on the current stream has run."""
        copied = torch.accelerator.current_stream().record_event() if self._waits else None
        self._free.append((memory, copied))


class StagedStorage(DeviceStorage):
    """Shards rest on the host, and go to the device by pinned memory of a pool."""

    def __init__(self, pool: PinnedPool) -> None:
        super().__init__()
        self._pool = pool

    @override
    def rest(self, shard: Tensor) -> Tensor:
        self._near = shard
        resting = shard.cpu() if shard.device.type != "cpu" else shard
        return super().rest(resting)

    @override
    def view(self) -> Tensor:
        return self._near

    @override
    def fetch(self) -> None:
        resting = super().view()
        if self._near is resting:
            return
        staging = self._pool.take(resting)
        staging[: resting.numel()].copy_(resting)
        self._near.copy_(staging[: resting.numel()], non_blocking=True)
        self._pool.give_back(staging)

    @override
    def place_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.to(super().view().device)


class StagedFactory(StorageFactory):
    name, settings = "staged", ""

    def __init__(self, waits: bool) -> None:
        self._pool = PinnedPool(waits)
        self.settings = f"waits={waits}"

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> StagedStorage:
        return StagedStorage(self._pool)


class Patient(Plugin):
    """A storage that waits before it rewrites pinned memory."""

    name, waits = "patient", True

    def __init__(self) -> None:
        self._factory = StagedFactory(self.waits)

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> StagedFactory:
        return self._factory


class Hasty(Patient):
    """A storage that frees pinned memory while a copy reads it."""

    name, waits = "hasty", False
