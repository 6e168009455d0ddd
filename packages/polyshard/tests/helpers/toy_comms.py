"""A user's own collectives: torch's, counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CountingComm:
    """A user's own collective: torch's, counted."""

    def __init__(self) -> None:
        self.calls = 0
        self.allocated = 0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        self.allocated += 1
        return torch.full(tuple(size), float("nan"), dtype=dtype, device=device)


class CountingGather(CountingComm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls += 1
        work: dist.Work | None
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        return work


class CountingReduce(CountingComm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls += 1
        work: dist.Work | None
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        return work


class RotatedReduce(CountingReduce):
    """Adds each rank's chunk from the next rank on, as a ring does: in another order on each."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        size = group.size()
        rows = parts.view(size, -1).roll(-group.rank() - 1, dims=0)
        output_tensor.copy_(rows[0])
        for row in rows[1:]:
            output_tensor.add_(row)
        return None
