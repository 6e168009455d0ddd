"""Codecs whose results are known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import (
    BoundGatherCodec,
    BoundReduceCodec,
    BoundReplicaCodec,
    GatherCodec,
    GroupInfo,
    ReduceCodec,
)
from polyshard.sharding.layout import GroupLayout


class BytesGather(BoundGatherCodec):
    """Ships each parameter's chunk as raw fp32 bytes: exact, one payload."""

    def __init__(self, layout: GroupLayout) -> None:
        self.layout = layout
        self.payload_bytes = 4 * sum(p.chunk_numel for p in layout.parameters)

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        parts = [
            shard[p.shard_offset : p.shard_offset + p.chunk_numel] for p in self.layout.parameters
        ]
        payload.copy_(torch.cat(parts).float().view(torch.uint8))

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        values = payloads.view(torch.float32)
        start = 0
        for placed, region in zip(self.layout.parameters, regions, strict=True):
            region.copy_(values[:, start : start + placed.chunk_numel])
            start += placed.chunk_numel


class BytesReduce(BoundReduceCodec):
    """Ships gradients as raw fp32 bytes and sums them in rank order."""

    def __init__(self, layout: GroupLayout) -> None:
        self.payload_bytes = 4 * sum(p.chunk_numel for p in layout.parameters)

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        payloads.copy_(torch.cat(list(chunks), dim=1).float().view(torch.uint8))

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        values = payloads.view(torch.float32)
        start = 0
        for out in outs:
            out.copy_(values[:, start : start + out.numel()].sum(0))
            start += out.numel()


class GatherFactory(GatherCodec):
    name = "bytes"
    settings = "fp32"

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BytesGather:
        return BytesGather(layout)


class ReduceFactory(ReduceCodec):
    name = "bytes"
    settings = "fp32"

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BytesReduce:
        return BytesReduce(layout)


class Codecs(Plugin):
    """Claims both codecs."""

    name = "codecs"
    version = "1.2"

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> GatherFactory:
        return GatherFactory()

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceFactory:
        return ReduceFactory()


class OtherCodec(Plugin):
    """Claims the gather codec of groups of modules whose class name holds ``only``."""

    name = "other"
    version = "3"

    def __init__(self, only: str = "") -> None:
        self.only = only

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> GatherFactory | None:
        kinds = {p.module_class.__name__ for p in group.parameters}
        return GatherFactory() if any(self.only in kind for kind in kinds) else None


class KeptGather(BytesGather):
    """Counts how often it is asked to encode."""

    keeps_payload = True

    def __init__(self, layout: GroupLayout) -> None:
        super().__init__(layout)
        self.encoded = 0

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        self.encoded += 1
        super().encode(shard, payload)


class KeptFactory(GatherCodec):
    name = "kept"
    notices = ("kept: nothing to say",)

    def __init__(self) -> None:
        self.bound: list[KeptGather] = []

    def bind(self, group: GroupInfo, layout: GroupLayout) -> KeptGather:
        self.bound.append(KeptGather(layout))
        return self.bound[-1]


class Keeping(Plugin):
    """Keeps payloads while the shard stays the same."""

    name = "keeping"

    def __init__(self) -> None:
        self.factory = KeptFactory()

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> KeptFactory:
        return self.factory


class Doubling(BoundReplicaCodec):
    """Sums replicas exactly, and doubles the sum so that its use shows."""

    def __init__(self, layout: GroupLayout) -> None:
        self.payload_bytes = 4 * layout.shard_numel

    def encode(self, total: Tensor, payload: Tensor) -> None:
        payload.copy_(total.view(torch.uint8))

    def decode_sum(self, payloads: Tensor, total: Tensor) -> None:
        total.copy_(payloads.view(torch.float32).sum(0) * 2)


class TwoHops(BytesReduce):
    def __init__(self, layout: GroupLayout) -> None:
        super().__init__(layout)
        self.replicas = Doubling(layout)


class TwoHopFactory(ReduceCodec):
    name = "two hops"
    settings = ""

    def __init__(self) -> None:
        self.trainable: list[int] = []

    def bind(self, group: GroupInfo, layout: GroupLayout) -> TwoHops:
        self.trainable.append(sum(p.requires_grad for p in group.parameters))
        return TwoHops(layout)


class TwoHopReduction(Plugin):
    """Owns both hops of a reduction."""

    name = "two_hops"

    def __init__(self) -> None:
        self.factory = TwoHopFactory()

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> TwoHopFactory:
        return self.factory


class Names(Plugin, GatherCodec):
    """Remembers the names its gather codec was bound with."""

    name = "names"

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> Names:
        return self

    @property
    def settings(self) -> str:
        return ""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> None:
        self.seen.append(tuple(p.fqn for p in group.parameters))
