"""Shards in host memory, and how they get to the device for a gather."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from polyshard_offload.shards.gradients import GradientStorage
from polyshard_offload.shards.staging import StagingState
from polyshard_offload.shards.storage import TierStorage
from polyshard_offload.tiers.host_memory import Arena, typed


class HostStorage(TierStorage):
    """A shard in host memory: page-locked beside an accelerator, in an arena always."""

    def __init__(
        self,
        arena: Arena,
        device: torch.device,
        staging: StagingState,
        gradients: GradientStorage,
        prefetch_units: int,
    ) -> None:
        """Shards rest in ``arena``."""
        on_host = device.type == "cpu"  # where a copy ahead of time hides behind nothing
        super().__init__(device, staging, gradients, 0 if on_host else prefetch_units)
        self._wanted_units = self.prefetch_units
        self._arena = arena
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._on_the_way = False

    def _keep(self, shard: Tensor) -> Tensor:
        resting = typed(self._arena.take(shard.nbytes), shard.dtype)
        resting.copy_(shard)
        return resting

    @property
    @override
    def staged_bytes(self) -> int:
        return 0 if self._serves_codec else self.shard_bytes

    @override
    def serve_codec(self, enable: bool) -> None:
        # A codec reads the shard itself: nothing is copied, and nothing ahead of time.
        super().serve_codec(enable)
        self.prefetch_units = 0 if enable else self._wanted_units

    @override
    def view(self) -> Tensor:
        return self._shard if self._serves_codec else super().view()

    @override
    def prefetch(self) -> None:
        # Without an accelerator there is nothing that a copy could hide behind.
        if self._stream is not None and not (self._on_the_way or self._serves_codec):
            self._copy(self._stream)

    def _copy(self, stream: torch.Stream) -> None:
        staging = self._stage()
        staging.in_use()
        # The memory just taken may be in use by work launched before on the compute stream.
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            staging.tensor.copy_(self._shard, non_blocking=True)
        self._on_the_way = True

    @override
    def fetch(self) -> None:
        if self._serves_codec:
            return
        if self._stream is None:
            staging = self._stage()
            staging.in_use()
            staging.tensor.copy_(self._shard)
            return
        if not self._on_the_way:
            self._copy(self._stream)
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        self._on_the_way = False

    @override
    def release(self) -> None:
        # A copy that nobody waited for must end before its memory goes.
        if self._on_the_way and self._stream is not None:
            self._stream.synchronize()
            self._on_the_way = False
        super().release()
