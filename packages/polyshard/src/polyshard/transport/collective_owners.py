"""Whole tensors to one rank, and parts of them back, by collectives of ``torch.distributed``.

They pair by order, and run on the lane of reductions where the device has streams. Parts travel
padded to the size of the largest, because scatters and gathers take equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from polyshard.memory.streams import Lane
from polyshard.transport.base import DONE, OwnerRoute, Pending


class CollectiveOwner(OwnerRoute):
    """One ``reduce``, ``scatter``, ``gather`` or ``broadcast`` each."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        lane: Callable[[], Lane] = lambda: Lane(None, 0),
    ) -> None:
        """Among the ranks of ``group``; ``dtype`` is that of sums.

        Without a ``lane`` all runs on the current stream.
        """
        self._group = group
        self._dtype = dtype
        self._lane = lane

    @override
    def reduce(self, key: int, owner: int, source: Tensor, out: Tensor | None) -> Pending:
        del key
        # A copy in any case: some backends write to what the others send.
        value = source.to(self._dtype, copy=True) if out is None else out.copy_(source)
        lane = self._lane()
        with lane.enter():
            dist.reduce(value, group=self._group, group_dst=owner)
        return lane.leave(value)

    @override
    def scatter(
        self, key: int, owner: int, parts: Sequence[Tensor] | None, out: Tensor, most: int
    ) -> Pending:
        del key
        received = out.new_empty(most)
        sent = None if parts is None else [_padded(part, most) for part in parts]
        lane = self._lane()
        with lane.enter():
            dist.scatter(received, sent, group=self._group, group_src=owner)
            out.copy_(received[: out.numel()])
        return lane.leave((received, sent, out))

    @override
    def gather(
        self, key: int, owner: int, source: Tensor, parts: Sequence[Tensor] | None, most: int
    ) -> Pending:
        del key
        received = None if parts is None else [source.new_empty(most) for _ in parts]
        sent = _padded(source, most)
        lane = self._lane()
        with lane.enter():
            dist.gather(sent, received, group=self._group, group_dst=owner)
            for part, whole in zip(parts or (), received or (), strict=True):
                part.copy_(whole[: part.numel()])
        return lane.leave((sent, received, parts))

    @override
    def broadcast(self, key: int, owner: int, value: Tensor) -> Pending:
        del key
        if not value.numel():
            return DONE
        lane = self._lane()
        with lane.enter():
            dist.broadcast(value, group=self._group, group_src=owner)
        return lane.leave(value)


def _padded(part: Tensor, numel: int) -> Tensor:
    if part.numel() == numel:
        return part.contiguous()
    padded = part.new_zeros(numel)
    padded[: part.numel()].copy_(part)
    return padded
