"""Send gradient matrices as two thin factors (as PowerSGD does), with error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyshard import GroupInfo, ReduceCodecPlugin


class Factors:
    """Each destination's chunk of one matrix, as ``left @ right.T``."""

    def __init__(self, group: GroupInfo, rows: int, columns: int, rank: int) -> None:
        self._rank, self._sizes = rank, [rank * rows, rank * columns]
        basis = torch.eye(columns, rank, device=group.device)  # steps turn it
        self.basis = basis.expand(group.world_size, columns, rank)
        self.error = torch.zeros(group.world_size, rows, columns, device=group.device)

    def encode(self, chunk: Tensor, sent: Tensor) -> None:
        """One step of the power method from the last basis; what it misses is kept."""
        wanted = chunk.float().reshape(self.error.shape) + self.error
        left = torch.linalg.qr(wanted @ self.basis).Q
        self.basis = wanted.mT @ left
        sent.copy_(torch.cat([left.flatten(1), self.basis.flatten(1)], dim=1))
        self.error = wanted - self.decode(sent.float())  # as it arrives, rounded

    def decode(self, sent: Tensor) -> Tensor:
        left, right = (p.unflatten(1, (-1, self._rank)) for p in sent.split(self._sizes, dim=1))
        return torch.bmm(left, right.mT)


@dataclass(frozen=True, eq=False)
class LowRankGradients(ReduceCodecPlugin):
    """Gradient matrices travel as ``rank`` columns and ``rank`` rows, where that is less."""

    name = "low_rank_gradients"
    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"low_rank_gradients: rank must be at least 1, got {self.rank}")

    def setup(self) -> None:
        self.factors, self.sizes = list[Factors | None](), list[int]()
        for placed in self.layout.parameters:
            rows = placed.chunk_shape[0] if len(placed.shape) > 1 else 1
            columns = placed.chunk_numel // max(rows, 1)
            thin, whole = self.rank * (rows + columns), placed.chunk_numel
            made = Factors(self.group, rows, columns, self.rank) if thin < whole else None
            self.factors.append(made)
            self.sizes.append(min(thin, whole))

    def state_dict(self) -> dict[str, Any]:
        kept = {i: f for i, f in enumerate(self.factors) if f}
        return {str(i): {"basis": f.basis, "error": f.error} for i, f in kept.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for index, saved in state_dict.items():
            factors = self.factors[int(index)]
            assert factors is not None, "saved for matrices of other shapes"
            factors.basis, factors.error = saved["basis"].clone(), saved["error"].clone()

    def payload_size(self) -> int | None:
        itemsize = self.group.reduce_dtype.itemsize
        return None if self.group.world_size == 1 else sum(self.sizes) * itemsize

    def begin(self, present: frozenset[int]) -> None:
        self.present = present

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        parts = payloads.view(self.group.reduce_dtype).split(self.sizes, dim=1)
        for index, (factors, sent) in enumerate(zip(self.factors, parts, strict=True)):
            if factors and index in self.present:
                factors.encode(chunks[index], sent)
            else:  # a matrix without a gradient: what is kept of it waits
                sent.copy_(sent.new_zeros(()) if factors else chunks[index])

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        parts = payloads.view(self.group.reduce_dtype).float().split(self.sizes, dim=1)
        for factors, part, out in zip(self.factors, parts, outs, strict=True):
            out.copy_((factors.decode(part) if factors else part).sum(0).flatten())
