"""Whole tensors to one rank, and parts of them back, by collectives of ``torch.distributed``.

They pair by order, and run beside the computation where the backend has a stream for them. Parts
travel padded to the size of the largest, because scatters and gathers take equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from polyshard.transport.base import DONE, OwnerRoute, Pending


@dataclass(frozen=True)
class _Pending:
    """A collective in flight."""

    work: Any
    """Of torch; it holds the tensors until the current stream waits for it."""
    finish: Callable[[], None]
    """Puts what came where it belongs, and keeps it alive until then."""

    def wait(self) -> None:
        """See :class:`polyshard.transport.base.Pending`."""
        self.work.wait()
        self.finish()


class CollectiveOwner(OwnerRoute):
    """One ``reduce``, ``scatter``, ``gather`` or ``broadcast`` each."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        """Among the ranks of ``group``; ``dtype`` is that of sums."""
        self._group = group
        self._dtype = dtype

    @override
    def reduce(self, key: int, owner: int, source: Tensor, out: Tensor | None) -> Pending:
        del key
        # A copy in any case: some backends write to what the others send.
        value = source.to(self._dtype, copy=True) if out is None else out.copy_(source)
        work = dist.reduce(value, group=self._group, group_dst=owner, async_op=True)
        return _Pending(work, lambda: None)

    @override
    def scatter(
        self, key: int, owner: int, parts: Sequence[Tensor] | None, out: Tensor, most: int
    ) -> Pending:
        del key
        received = out.new_empty(most)
        sent = None if parts is None else [_padded(part, most) for part in parts]
        work = dist.scatter(received, sent, group=self._group, group_src=owner, async_op=True)
        return _Pending(work, lambda: _fill([out], [received]))

    @override
    def gather(
        self, key: int, owner: int, source: Tensor, parts: Sequence[Tensor] | None, most: int
    ) -> Pending:
        del key
        received = None if parts is None else [source.new_empty(most) for _ in parts]
        sent = _padded(source, most)
        work = dist.gather(sent, received, group=self._group, group_dst=owner, async_op=True)
        return _Pending(work, lambda: _fill(parts or (), received or ()))

    @override
    def broadcast(self, key: int, owner: int, value: Tensor) -> Pending:
        del key
        if not value.numel():
            return DONE
        work = dist.broadcast(value, group=self._group, group_src=owner, async_op=True)
        return _Pending(work, lambda: None)


def _fill(parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    for part, padded in zip(parts, received, strict=True):
        part.copy_(padded[: part.numel()])


def _padded(part: Tensor, numel: int) -> Tensor:
    if part.numel() == numel:
        return part.contiguous()
    padded = part.new_zeros(numel)
    padded[: part.numel()].copy_(part)
    return padded
