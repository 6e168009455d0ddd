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
    """A shard in host memory: page-locked beside an accelerator, in an arena always.

    It is copied to the device ahead of its gather, on that one's stream. Gathers are started while
    another unit computes, so nothing has to be brought near before.
    """

    fetches_on_stream = True

    def __init__(
        self, arena: Arena, device: torch.device, staging: StagingState, gradients: GradientStorage
    ) -> None:
        """Shards rest in ``arena``."""
        super().__init__(device, staging, gradients)
        self._arena = arena

    def _keep(self, shard: Tensor) -> Tensor:
        resting = typed(self._arena.take(shard.nbytes), shard.dtype)
        resting.copy_(shard)
        return resting

    @property
    @override
    def staged_bytes(self) -> int:
        return 0 if self._serves_codec else self.shard_bytes

    @override
    def view(self) -> Tensor:
        return self._shard if self._serves_codec else super().view()

    @override
    def fetch(self) -> None:
        if self._serves_codec:  # it reads the shard itself
            return
        staging = self._stage()
        staging.in_use()
        self._staging_state.copy(staging.tensor, self._shard)
