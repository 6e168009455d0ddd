"""All-gather float32 weights as bfloat16: half the bytes, weights of eight bits of mantissa."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyshard import GatherCodecPlugin

WIRE = torch.bfloat16


class Bf16Gather(GatherCodecPlugin):
    """Weights travel as bfloat16; optimizers keep seeing the original ones."""

    name = "bf16_gather"

    def payload_size(self) -> int | None:
        """Leaves to the engine what travels in two bytes anyway: that needs no copy."""
        if min(self.group.orig_dtype.itemsize, self.group.param_dtype.itemsize) <= WIRE.itemsize:
            return None
        return self.layout.shard_numel * WIRE.itemsize

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        payload.view(WIRE).copy_(shard)  # padding travels along, and is not read

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        shards = payloads.view(WIRE)
        for placed, region in zip(self.layout.parameters, regions, strict=True):
            region.copy_(shards.narrow(1, placed.shard_offset, placed.chunk_numel))
