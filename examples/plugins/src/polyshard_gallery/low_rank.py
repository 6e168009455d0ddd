"""Send gradient matrices as two thin factors (as PowerSGD does), with error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyshard import BoundReduceCodec, Plugin, ReduceCodec, hookimpl
from polyshard.seams import GroupInfo, GroupLayout


class Factors:
    """Each destination's chunk of one matrix, as ``left @ right.T``."""

    def __init__(self, group: GroupInfo, rows: int, columns: int, rank: int) -> None:
        self._rank, self._sizes = rank, [rank * rows, rank * columns]
        self._basis = torch.eye(columns, rank, device=group.device)  # steps turn it
        self._error = torch.zeros(group.world_size, rows, columns, device=group.device)

    def encode(self, chunk: Tensor, sent: Tensor) -> None:
        """One step of the power method from the last basis; what it misses is kept."""
        wanted = chunk.float().reshape(self._error.shape) + self._error
        left = torch.linalg.qr(wanted @ self._basis).Q
        self._basis = wanted.mT @ left
        sent.copy_(torch.cat([left.flatten(1), self._basis.flatten(1)], dim=1))
        self._error = wanted - self.decode(sent.float())  # as it arrives, rounded

    def decode(self, sent: Tensor) -> Tensor:
        left, right = (p.unflatten(1, (-1, self._rank)) for p in sent.split(self._sizes, dim=1))
        return torch.bmm(left, right.mT)


class BoundLowRank(BoundReduceCodec):
    """Matrices as factors where that is less; the others whole."""

    def __init__(self, group: GroupInfo, layout: GroupLayout, rank: int) -> None:
        self._dtype, self._factors, self._sizes = group.reduce_dtype, list[Factors | None](), []
        for placed in layout.parameters:
            rows = placed.chunk_shape[0] if len(placed.shape) > 1 else 1
            columns = placed.chunk_numel // max(rows, 1)
            thin, whole = rank * (rows + columns), placed.chunk_numel
            self._factors.append(Factors(group, rows, columns, rank) if thin < whole else None)
            self._sizes.append(min(thin, whole))
        self.payload_bytes = sum(self._sizes) * self._dtype.itemsize

    def begin(self, present: frozenset[int]) -> None:
        self._present = present

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        parts = payloads.view(self._dtype).split(self._sizes, dim=1)
        for index, (factors, sent) in enumerate(zip(self._factors, parts, strict=True)):
            if factors and index in self._present:
                factors.encode(chunks[index], sent)
            else:  # a matrix without a gradient: what is kept of it waits
                sent.copy_(sent.new_zeros(()) if factors else chunks[index])

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        parts = payloads.view(self._dtype).float().split(self._sizes, dim=1)
        for factors, part, out in zip(self._factors, parts, outs, strict=True):
            out.copy_((factors.decode(part) if factors else part).sum(0).flatten())


@dataclass(frozen=True, eq=False)
class LowRankGradients(Plugin, ReduceCodec):
    """Gradient matrices travel as ``rank`` columns and ``rank`` rows."""

    name = "low_rank_gradients"
    rank: int = 4

    @hookimpl
    def polyshard_reduce_codec(self) -> ReduceCodec:
        return self

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundLowRank | None:
        if self.rank < 1:
            raise ValueError(f"low_rank_gradients: rank must be at least 1, got {self.rank}")
        return BoundLowRank(group, layout, self.rank) if group.world_size > 1 else None
