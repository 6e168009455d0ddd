"""Send only the largest gradient elements, and keep the rest for the next step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyshard import BoundReduceCodec, Plugin, ReduceCodec, hookimpl
from polyshard.seams import GroupInfo, GroupLayout


class BoundTopK(BoundReduceCodec):
    """Per destination: ``kept`` positions (int32), then their values in the reduce dtype."""

    def __init__(self, group: GroupInfo, layout: GroupLayout, fraction: float) -> None:
        self._numels = [placed.chunk_numel for placed in layout.parameters]
        total = sum(self._numels)
        self._kept = math.ceil(fraction * total)
        self._dtype = group.reduce_dtype
        self._split = 4 * self._kept
        self._end = self._split + self._kept * self._dtype.itemsize
        self.payload_bytes = -(-self._end // 4) * 4  # rows start where an int32 may
        self._error = torch.zeros(group.world_size, total, device=group.device)

    def begin(self, present: frozenset[int]) -> None:
        """What is kept for a parameter waits while it has no gradient."""
        flags = [torch.full((n,), i in present) for i, n in enumerate(self._numels)]
        self._present = torch.cat(flags).to(self._error.device)

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        wanted = torch.cat(list(chunks), dim=1).float() + self._error * self._present
        chosen = wanted.abs().topk(self._kept, dim=1).indices
        exact = wanted.gather(1, chosen)
        sent = exact.to(self._dtype)
        payloads[:, : self._split].view(torch.int32).copy_(chosen)
        payloads[:, self._split : self._end].view(self._dtype).copy_(sent)
        rest = wanted.scatter(1, chosen, exact - sent.float())
        # A step that overflowed is sent as it is, and forgotten.
        self._error = torch.where(self._present, rest, self._error).nan_to_num_(0.0, 0.0, 0.0)

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        total = torch.zeros(sum(self._numels), device=payloads.device)
        for payload in payloads:  # in rank order, so that every run gives the same bits
            chosen = payload[: self._split].view(torch.int32)
            values = payload[self._split : self._end].view(self._dtype)
            total.index_add_(0, chosen, values.float())
        for out, part in zip(outs, total.split(self._numels), strict=True):
            out.copy_(part)


@dataclass(frozen=True, eq=False)
class TopKGradients(Plugin, ReduceCodec):
    """``fraction`` of the elements travel, with what earlier steps left behind of them."""

    name = "topk_gradients"
    fraction: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"topk_gradients: fraction must be in (0, 1], got {self.fraction}")

    @hookimpl
    def polyshard_reduce_codec(self) -> ReduceCodec:
        """The plugin is its own factory: its fields are its settings already."""
        return self

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundTopK | None:
        if group.world_size == 1 or layout.shard_numel == 0:
            return None
        return BoundTopK(group, layout, self.fraction)
