"""Tensors change their owners: each row goes from who holds it to who will, if that is another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from polyshard_resilience.resizing.seats import Seats


@dataclass(frozen=True)
class Moving:
    """One tensor: what this rank holds of it, and where it will rest.

    Attributes:
        shape: of all of it.
        dtype: the same on all ranks.
        dim: that is cut into rows; ``None`` for a tensor that every holder has whole.
        held: the part of this rank now, if it has one.
        made: memory for the part that it will have, if it will; ``held`` itself where that stays.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    held: Tensor | None
    made: Tensor | None


@dataclass(frozen=True)
class Exchange:
    """Moves tensors among the ranks of ``group``, over memory of ``device``."""

    seats: Seats
    group: dist.ProcessGroup
    device: torch.device

    @torch.no_grad()
    def move(self, tensors: Sequence[Moving]) -> tuple[int, int]:
        """Fill what was made; all ranks call it with the same tensors, in the same order.

        Returns:
            Bytes that this rank sent to others, and that it received.
        """
        sent = received = 0
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            out, into = self._move_alike([t for t in tensors if t.dtype is dtype], dtype)
            sent, received = sent + out, received + into
        return sent, received

    def _move_alike(self, tensors: Sequence[Moving], dtype: torch.dtype) -> tuple[int, int]:
        own, every = dist.get_rank(self.group), range(dist.get_world_size(self.group))
        staying = zip(self._targets(tensors, own), self._sources(tensors, own), strict=True)
        for target, source in staying:
            if target is not source:
                target.copy_(source)
        going = [list(self._sources(tensors, rank)) if rank != own else [] for rank in every]
        coming = [list(self._targets(tensors, rank)) if rank != own else [] for rank in every]
        away = [part.detach().to(self.device).reshape(-1) for parts in going for part in parts]
        out = torch.cat(away) if away else torch.empty(0, dtype=dtype, device=self.device)
        come = [sum(part.numel() for part in parts) for parts in coming]
        into = torch.empty(sum(come), dtype=dtype, device=self.device)
        size = dtype.itemsize
        dist.all_to_all_single(
            into.view(torch.uint8),
            out.view(torch.uint8),
            [numel * size for numel in come],
            [sum(part.numel() for part in parts) * size for parts in going],
            group=self.group,
        )
        start = 0
        for part in (part for parts in coming for part in parts):
            part.copy_(into[start : start + part.numel()].view(part.shape))
            start += part.numel()
        return out.nbytes, into.nbytes

    def _sources(self, tensors: Sequence[Moving], target: int) -> Iterator[Tensor]:
        """What this rank has for ``target``."""
        own = dist.get_rank(self.group)
        return self._parts(((one, one.held) for one in tensors), own, target, self.seats.held)

    def _targets(self, tensors: Sequence[Moving], source: int) -> Iterator[Tensor]:
        """Where what ``source`` has for this rank belongs."""
        own = dist.get_rank(self.group)
        return self._parts(((one, one.made) for one in tensors), source, own, self.seats.wanted)

    def _parts(
        self,
        tensors: Iterable[tuple[Moving, Tensor | None]],
        source: int,
        target: int,
        rows_of: Callable[[int, int], tuple[int, int]],
    ) -> Iterator[Tensor]:
        """What goes from ``source`` to ``target``, in memory of this rank.

        ``rows_of`` says, of an extent and this rank, which rows that memory has.
        """
        own, seats = dist.get_rank(self.group), self.seats
        for one, local in tensors:
            if local is None:
                continue
            if one.dim is None:
                if seats.gives_whole(source, target):
                    yield local
            else:
                extent = one.shape[one.dim]
                start = rows_of(extent, own)[0]
                yield from _part(local, one.dim, seats.shared(extent, source, target), start)


def _part(local: Tensor, dim: int, rows: tuple[int, int], start: int) -> Iterator[Tensor]:
    """``rows`` of ``local``, which begins with row ``start``; nothing where there are none."""
    if rows[1] > rows[0]:
        yield local.narrow(dim, rows[0] - start, rows[1] - rows[0])
