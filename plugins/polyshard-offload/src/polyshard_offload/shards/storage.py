"""What shards that rest off the device have in common, whatever the tier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.plugins.seams import ShardStorage
from polyshard_offload.shards.gradients import GradientStorage
from polyshard_offload.shards.norms import GradientNorms
from polyshard_offload.shards.staging import Staging, StagingState


class TierStorage(ShardStorage):
    """What all tiers share: all but the tier itself, which a subclass knows."""

    holds_gradients = True

    def __init__(
        self,
        device: torch.device,
        staging: StagingState,
        gradients: GradientStorage,
    ) -> None:
        """Shards are computed with on ``device``."""
        self.gradients = gradients
        self.places_on_stream = gradients.places_on_stream
        self.norms = GradientNorms()
        self._device = device
        self._compute_device = device
        self._serves_codec = False
        self._staging_state = staging
        self._shard = torch.empty(0, device="cpu")
        self._staging: Staging | None = None

    @property
    def shard_bytes(self) -> int:
        """Bytes of the resting shard."""
        return self._shard.nbytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of staging that a gather needs."""
        return self.shard_bytes

    @override
    def serve_codec(self, enable: bool) -> None:
        """Have a codec read the shard on the host, so that only its payload moves from there."""
        self.release()
        self._staging = None
        self._serves_codec = enable
        self._device = torch.device("cpu") if enable else self._compute_device

    @override
    def rest(self, shard: Tensor) -> Tensor:
        """Take a shard over; a shard on the meta device has no values to keep yet."""
        self.release()
        self._shard = shard if shard.is_meta else self._keep(shard)
        self._staging = None
        return self._shard

    def _keep(self, shard: Tensor) -> Tensor:
        raise NotImplementedError

    def _stage(self) -> Staging:
        if self._staging is None:
            shard = self._shard
            self._staging = Staging(shard.numel(), shard.dtype, self._device, self._staging_state)
        return self._staging

    @override
    def view(self) -> Tensor:
        return self._shard if self._shard.is_meta else self._stage().viewable()

    @override
    def release(self) -> None:
        if self._staging is not None:
            self._staging.release()

    @override
    def place_gradient(self, gradient: Tensor) -> Tensor:
        placed = self.gradients.place(gradient)
        self._staging_state.gradient_moves += 1
        if self._staging_state.records_norms:
            self.norms.record(gradient, placed)
        return placed

    @override
    def settle(self) -> None:
        self._staging_state.settle()

    @override
    def hold(self, parameters: Sequence[Tensor]) -> None:
        self.norms.hold(parameters, self._shard)
