"""Shards in host memory, and how they get to the device for a gather."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.memory.streams import Arrived, Passage, streams_of
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
        # On the host a copy ahead of time hides behind nothing.
        self._is_apart = streams_of(device) is not None
        super().__init__(device, staging, gradients, prefetch_units if self._is_apart else 0)
        self._wanted_units = self.prefetch_units
        self._arena = arena
        self._on_the_way: Passage | Arrived | None = None

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
        if self._is_apart and not self._serves_codec:
            self._copy()

    def _copy(self) -> None:
        """Start to copy, unless that is under way. See [Note: lanes] of the streams."""
        if self._on_the_way is not None:
            return
        staging, lane = self._stage(), self._staging_state.fetches(self._device)
        staging.in_use()
        with lane.enter():
            staging.tensor.copy_(self._shard, non_blocking=True)
        self._on_the_way = lane.leave(staging.tensor)
        lane.hold(self._shard)

    @override
    def fetch(self) -> None:
        if self._serves_codec:
            return
        self._copy()
        on_the_way, self._on_the_way = self._on_the_way, None
        assert on_the_way is not None
        on_the_way.wait()

    @override
    def release(self) -> None:
        # A copy that nobody waited for: dropping it orders the memory's next use behind it.
        self._on_the_way = None
        super().release()

    @override
    def settle(self) -> None:
        super().settle()
        if self._is_apart:
            self._staging_state.fetches(self._compute_device).drain()
