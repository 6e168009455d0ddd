"""All-gather float32 weights as bfloat16: half the bytes, weights of eight bits of mantissa."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyshard import CodecGroup, GatherCodecPlugin
from polyshard.plugins.seams import GroupInfo, GroupLayout

WIRE = torch.bfloat16


class Bf16Gather(GatherCodecPlugin):
    """Weights travel as bfloat16; optimizers keep seeing the original ones."""

    name = "bf16_gather"

    def payload_bytes(self, group: GroupInfo, layout: GroupLayout) -> int | None:
        """Leaves to the engine what travels in two bytes anyway: that needs no copy."""
        if min(group.orig_dtype.itemsize, group.param_dtype.itemsize) <= WIRE.itemsize:
            return None
        return layout.shard_numel * WIRE.itemsize

    def encode(self, shard: Tensor, payload: Tensor, at: CodecGroup) -> None:
        """The whole shard, cast; what stands between chunks travels along, and nobody reads it."""
        payload.view(WIRE).copy_(shard)

    def decode(self, payloads: Tensor, regions: Sequence[Tensor], at: CodecGroup) -> None:
        shards = payloads.view(WIRE)
        for placed, region in zip(at.layout.parameters, regions, strict=True):
            region.copy_(shards.narrow(1, placed.shard_offset, placed.chunk_numel))
