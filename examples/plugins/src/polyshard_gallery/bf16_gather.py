"""All-gather float32 weights as bfloat16: half the bytes, weights of eight bits of mantissa."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyshard import BoundGatherCodec, GatherCodec, Plugin, hookimpl
from polyshard.seams import GroupInfo, GroupLayout

WIRE = torch.bfloat16


class BoundBf16(BoundGatherCodec):
    """The whole shard, cast; what stands between chunks travels along, and nobody reads it."""

    def __init__(self, layout: GroupLayout) -> None:
        self._placed = layout.parameters
        self.payload_bytes = layout.shard_numel * WIRE.itemsize

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        payload.view(WIRE).copy_(shard)

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        shards = payloads.view(WIRE)
        for placed, region in zip(self._placed, regions, strict=True):
            region.copy_(shards.narrow(1, placed.shard_offset, placed.chunk_numel))


class Bf16Codec(GatherCodec):
    """Leaves to the engine what travels in two bytes anyway: that needs no copy."""

    name, settings = "bf16", ""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundBf16 | None:
        if min(group.orig_dtype.itemsize, group.param_dtype.itemsize) <= WIRE.itemsize:
            return None
        return BoundBf16(layout)


class Bf16Gather(Plugin):
    """Weights travel as bfloat16; optimizers keep seeing the original ones."""

    name = "bf16_gather"

    @hookimpl
    def polyshard_gather_codec(self) -> Bf16Codec:
        """One codec serves all groups: what belongs to a group is in what ``bind`` returns."""
        return Bf16Codec()
