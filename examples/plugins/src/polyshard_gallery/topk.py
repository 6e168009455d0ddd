"""Send only the largest gradient elements, and keep the rest for the next step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyshard import ReduceCodecPlugin


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

    def setup(self) -> None:
        self.numels = [placed.chunk_numel for placed in self.layout.parameters]
        self.kept = math.ceil(self.fraction * sum(self.numels))
        shape = (self.group.world_size, sum(self.numels))
        self.error = torch.zeros(shape, device=self.group.device)  # what was not sent yet

    def state_dict(self) -> dict[str, Any]:
        return {"error": self.error}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.error = state_dict["error"].clone()

    def payload_size(self) -> int | None:
        if self.group.world_size == 1 or not self.kept:
            return None
        size = self.group.reduce_dtype.itemsize
        aligned = max(4, size)  # rows start where an int32 and a value may
        return -(-self.kept * (4 + size) // aligned) * aligned

    def begin(self, present: frozenset[int]) -> None:
        """What is kept for a parameter waits while it has no gradient."""
        flags = [torch.full((n,), i in present) for i, n in enumerate(self.numels)]
        self.present = torch.cat(flags).to(self.error.device, non_blocking=True)

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        wanted = torch.cat(list(chunks), dim=1).float() + self.error * self.present
        chosen = wanted.abs().topk(self.kept, dim=1).indices
        exact = wanted.gather(1, chosen)
        positions, values = self.parts(payloads)
        positions.copy_(chosen)
        sent = values.copy_(exact)
        rest = wanted.scatter(1, chosen, exact - sent.float())
        # A step that overflowed is sent as it is, and forgotten.
        self.error = torch.where(self.present, rest, self.error).nan_to_num_(0.0, 0.0, 0.0)

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        total = torch.zeros(sum(self.numels), device=payloads.device)
        # In rank order, so that every run gives the same bits.
        for positions, values in zip(*self.parts(payloads), strict=True):
            total.index_add_(0, positions, values.float())
        for out, part in zip(outs, total.split(self.numels), strict=True):
            out.copy_(part)

    def parts(self, payloads: Tensor) -> tuple[Tensor, Tensor]:
        """The wider ones come first, so that both start where they may."""
        dtype = self.group.reduce_dtype
        wide, narrow = sorted((dtype, torch.int32), key=lambda d: -d.itemsize)
        middle, end = self.kept * wide.itemsize, self.kept * (4 + dtype.itemsize)
        parts = payloads[:, :middle].view(wide), payloads[:, middle:end].view(narrow)
        return parts if wide is torch.int32 else parts[::-1]
