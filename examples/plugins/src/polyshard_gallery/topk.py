"""Send only the largest gradient elements, and keep the rest for the next step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyshard import CodecGroup, ReduceCodecPlugin
from polyshard.plugins.seams import GroupInfo, GroupLayout


class LeftBehind:
    """Elements of each destination that were not sent yet; checkpoints hold them."""

    def __init__(self, group: GroupInfo, numels: list[int]) -> None:
        self.numels = numels
        self.error = torch.zeros(group.world_size, sum(numels), device=group.device)
        self.present = torch.ones(sum(numels), dtype=torch.bool, device=group.device)

    def state_dict(self) -> dict[str, Any]:
        return {"error": self.error}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.error = state_dict["error"].clone()


@dataclass(frozen=True, eq=False)
class TopKGradients(ReduceCodecPlugin):
    """``fraction`` of the elements travel, with what earlier steps left behind of them.

    A payload has positions (int32), then their values in the reduce dtype.
    """

    name = "topk_gradients"
    fraction: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"topk_gradients: fraction must be in (0, 1], got {self.fraction}")

    def payload_bytes(self, group: GroupInfo, layout: GroupLayout) -> int | None:
        if group.world_size == 1 or layout.shard_numel == 0:
            return None
        kept = self.kept(sum(placed.chunk_numel for placed in layout.parameters))
        nbytes = kept * (4 + group.reduce_dtype.itemsize)
        return -(-nbytes // 4) * 4  # rows start where an int32 may

    def kept(self, numel: int) -> int:
        return math.ceil(self.fraction * numel)

    def new_state(self, group: GroupInfo, layout: GroupLayout) -> LeftBehind:
        return LeftBehind(group, [placed.chunk_numel for placed in layout.parameters])

    def begin(self, present: frozenset[int], at: CodecGroup) -> None:
        """What is kept for a parameter waits while it has no gradient."""
        flags = [torch.full((n,), i in present) for i, n in enumerate(at.state.numels)]
        at.state.present = torch.cat(flags).to(at.state.error.device, non_blocking=True)

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor, at: CodecGroup) -> None:
        left: LeftBehind = at.state
        wanted = torch.cat(list(chunks), dim=1).float() + left.error * left.present
        chosen = wanted.abs().topk(self.kept(wanted.shape[1]), dim=1).indices
        exact = wanted.gather(1, chosen)
        positions, values = self.parts(payloads, at)
        positions.copy_(chosen)
        sent = values.copy_(exact)
        rest = wanted.scatter(1, chosen, exact - sent.float())
        # A step that overflowed is sent as it is, and forgotten.
        left.error = torch.where(left.present, rest, left.error).nan_to_num_(0.0, 0.0, 0.0)

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor], at: CodecGroup) -> None:
        total = torch.zeros(sum(at.state.numels), device=payloads.device)
        # In rank order, so that every run gives the same bits.
        for positions, values in zip(*self.parts(payloads, at), strict=True):
            total.index_add_(0, positions, values.float())
        for out, part in zip(outs, total.split(at.state.numels), strict=True):
            out.copy_(part)

    def parts(self, payloads: Tensor, at: CodecGroup) -> tuple[Tensor, Tensor]:
        kept, dtype = self.kept(sum(at.state.numels)), at.group.reduce_dtype
        end = kept * (4 + dtype.itemsize)
        return payloads[:, : 4 * kept].view(torch.int32), payloads[:, 4 * kept : end].view(dtype)
