"""The seams with toy parts in them: each is asked, bound once, and used in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from toy_models import assert_same_parameters, build, loss_of, shard, tokens_for
from torch import Tensor

from polyshard import describe, fully_shard, stats
from polyshard.defaults import DeviceStorage
from polyshard.layout import GroupLayout
from polyshard.root import units_below
from polyshard.seams import GroupInfo
from polyshard.testing import World


@dataclass
class BytesGather:
    """Ships each parameter's chunk as raw bytes of the parameter dtype: exact, one payload."""

    layout: GroupLayout
    payload_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.payload_bytes = 4 * sum(p.chunk_numel for p in self.layout.parameters)

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        parts = [
            shard[p.shard_offset : p.shard_offset + p.chunk_numel] for p in self.layout.parameters
        ]
        payload.copy_(torch.cat(parts).view(torch.uint8))

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        values = payloads.view(torch.float32)
        start = 0
        for placed, region in zip(self.layout.parameters, regions, strict=True):
            region.copy_(values[:, start : start + placed.chunk_numel])
            start += placed.chunk_numel


@dataclass
class BytesReduce:
    """Ships gradients as raw bytes and sums them in rank order."""

    layout: GroupLayout
    payload_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.payload_bytes = 4 * sum(p.chunk_numel for p in self.layout.parameters)

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        payloads.copy_(torch.cat(list(chunks), dim=1).view(torch.uint8))

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        values = payloads.view(torch.float32)
        start = 0
        for out in outs:
            out.copy_(values[:, start : start + out.numel()].sum(0))
            start += out.numel()


class Codecs:
    """Both codecs, as their factories."""

    name = "bytes"
    settings = "fp32"

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BytesGather:
        assert group.world_size == layout.world_size
        return BytesGather(layout)


class ReduceCodecs(Codecs):
    def bind(self, group: GroupInfo, layout: GroupLayout) -> BytesReduce:  # type: ignore[override]
        return BytesReduce(layout)


@dataclass
class Watcher:
    events: list[str] = field(default_factory=list)

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self.events.append(f"unshard {group}")

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        self.events.append(f"unsharded {group}")

    def on_reshard(self, group: str) -> None:
        self.events.append(f"reshard {group}")

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        self.events.append(f"reduce {group}")

    def on_reduced(self, group: str, wait_seconds: float) -> None:
        self.events.append(f"reduced {group}")

    def on_step_end(self) -> None:
        self.events.append("step end")
