"""Send gradient matrices as two thin factors (as PowerSGD does), with error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyshard import CodecGroup, ReduceCodecPlugin
from polyshard.plugins.seams import GroupInfo, GroupLayout


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


class Matrices:
    """Those of one group: as factors where that is less, the others whole."""

    def __init__(self, group: GroupInfo, layout: GroupLayout, rank: int) -> None:
        self.factors, self.sizes = list[Factors | None](), list[int]()
        self.present = frozenset[int]()
        for placed in layout.parameters:
            rows = placed.chunk_shape[0] if len(placed.shape) > 1 else 1
            columns = placed.chunk_numel // max(rows, 1)
            thin, whole = rank * (rows + columns), placed.chunk_numel
            self.factors.append(Factors(group, rows, columns, rank) if thin < whole else None)
            self.sizes.append(min(thin, whole))

    def state_dict(self) -> dict[str, Any]:
        kept = {i: f for i, f in enumerate(self.factors) if f}
        return {str(i): {"basis": f.basis, "error": f.error} for i, f in kept.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for index, saved in state_dict.items():
            factors = self.factors[int(index)]
            assert factors is not None, "saved for matrices of other shapes"
            factors.basis, factors.error = saved["basis"].clone(), saved["error"].clone()


@dataclass(frozen=True, eq=False)
class LowRankGradients(ReduceCodecPlugin):
    """Gradient matrices travel as ``rank`` columns and ``rank`` rows."""

    name = "low_rank_gradients"
    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"low_rank_gradients: rank must be at least 1, got {self.rank}")

    def new_state(self, group: GroupInfo, layout: GroupLayout) -> Matrices:
        return Matrices(group, layout, self.rank)

    def payload_bytes(self, group: GroupInfo, layout: GroupLayout) -> int | None:
        sizes = Matrices(group, layout, self.rank).sizes
        return None if group.world_size == 1 else sum(sizes) * group.reduce_dtype.itemsize

    def begin(self, present: frozenset[int], at: CodecGroup) -> None:
        at.state.present = present

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor, at: CodecGroup) -> None:
        parts = payloads.view(at.group.reduce_dtype).split(at.state.sizes, dim=1)
        for index, (factors, sent) in enumerate(zip(at.state.factors, parts, strict=True)):
            if factors and index in at.state.present:
                factors.encode(chunks[index], sent)
            else:  # a matrix without a gradient: what is kept of it waits
                sent.copy_(sent.new_zeros(()) if factors else chunks[index])

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor], at: CodecGroup) -> None:
        parts = payloads.view(at.group.reduce_dtype).float().split(at.state.sizes, dim=1)
        for factors, part, out in zip(at.state.factors, parts, outs, strict=True):
            out.copy_((factors.decode(part) if factors else part).sum(0).flatten())
