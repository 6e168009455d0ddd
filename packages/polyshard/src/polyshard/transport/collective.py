"""Collectives of ``torch.distributed``, one per piece: NCCL's path, and any other backend's.

They go to the stream that is current, which the engine chooses (see [Note: waits] of the programs).
On the CPU a collective has finished when it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from polyshard._torch.newer import backend_of, coalesces
from polyshard._torch.planned import stands_for
from polyshard._torch.private import coalescing, shared_group
from polyshard.transport.base import (
    DONE,
    Extents,
    GatherPiece,
    GatherRoute,
    Pending,
    ReduceRoute,
    Transport,
)
from polyshard.transport.collective_owners import CollectiveOwner

STAGING_BYTES = 256 << 10
"""A coalesced launch takes many tensors; only those too small to fill a link are packed."""


# torch 2.13 renamed both, and warns about the names that torch 2.11 has.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveGather(GatherRoute):
    """One ``all_gather_into_tensor`` per piece, coalesced where the backend can."""

    on_stream = True

    def __init__(
        self, pieces: Sequence[GatherPiece], transport: CollectiveTransport, tag: int
    ) -> None:
        """``tag`` is unused: collectives pair by order."""
        del tag
        self._transport = transport
        rank = transport.group.rank()
        self._casts = [p for p in pieces if p.source.dtype != p.region.dtype]
        self._cast_targets = [p.region[rank] for p in self._casts]
        self._cast_sources = [p.source for p in self._casts]
        self._transfers = [
            (p.region.view(-1), p.source if p.source.dtype == p.region.dtype else p.region[rank])
            for p in pieces
            if p.extents.chunk_numel
        ]
        self.sent_bytes = (transport.group.size() - 1) * sum(s.nbytes for _, s in self._transfers)
        self.received_bytes = self.sent_bytes

    @override
    def start(self) -> Pending:
        group = self._transport.group
        if self._casts:
            torch._foreach_copy_(self._cast_targets, self._cast_sources)
        with self._transport.together(group):
            for region, source in self._transfers:
                gather_single(region, source, group=group)
        return DONE


@dataclass(frozen=True)
class AlikeSums:
    """Sums that have to be the same on all ranks, where each rank adds in an order of its own.

    They come from the first rank. Sums of two ranks are the same in either order.
    """

    parts: tuple[tuple[int, int, int], ...]
    """Piece, start and stop of each."""

    @classmethod
    def among(cls, extents: Sequence[Extents], size: int) -> AlikeSums | None:
        """Those of the pieces of a reduction by ``size`` ranks, if there are any."""
        parts = [(piece, *bounds) for piece, e in enumerate(extents) for bounds in e.alike]
        return cls(tuple(parts)) if parts and size > 2 else None

    def numel(self, sources: Sequence[Tensor | None]) -> int:
        """Elements that the first rank sends to each other rank."""
        return sum(end - begin for p, begin, end in self.parts if sources[p] is not None)

    def of(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> list[Tensor]:
        """Each in ``outs``."""
        return [outs[p][begin:end] for p, begin, end in self.parts if sources[p] is not None]


def share_first(sums: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace ``sums`` by those of the first rank."""
    for each in sums:
        dist.broadcast(each, group=group, group_src=0)


class CollectiveReduce(ReduceRoute):
    """One ``reduce_scatter_tensor`` per piece; only uneven pieces are padded first."""

    on_stream = True
    is_awaited = False

    def __init__(
        self, extents: Sequence[Extents], dtype: torch.dtype, transport: CollectiveTransport
    ) -> None:
        """``dtype`` is the dtype on the wire and of the sums."""
        self._extents = tuple(extents)
        self._dtype = dtype
        self._transport = transport
        self._alike = AlikeSums.among(extents, transport.size)

    @override
    def sent_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """Every rank sends one padded chunk to each peer, in the reduction's dtype."""
        pairs = zip(sources, self._extents, strict=True)
        sent = sum(e.chunk_numel for s, e in pairs if s is not None)
        if self._alike is not None and self._transport.rank == 0:
            sent += self._alike.numel(sources)
        return (self._transport.size - 1) * sent * self._dtype.itemsize

    @override
    def prepare(self, sources: list[Tensor | None]) -> None:
        """Cast and pad."""
        for place, extents in enumerate(self._extents):  # zip would keep a source of the last turn
            source, full = sources[place], extents.chunk_numel * len(extents.numels)
            if source is None:
                continue
            if source.numel() == full:
                sources[place] = source.to(self._dtype)
            else:
                padded = source.new_zeros(full, dtype=self._dtype)
                padded[: source.numel()].copy_(source)
                sources[place] = padded

    @override
    def start(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Pending:
        group = self._transport.reduce_group
        with self._transport.together(group):
            for source, out, extents in zip(sources, outs, self._extents, strict=True):
                if source is not None and extents.chunk_numel:
                    pair = out, source
                    if source.is_complex():  # NCCL has pairs of numbers, which add up alike
                        pair = (
                            torch.view_as_real(out).view(-1),
                            torch.view_as_real(source).view(-1),
                        )
                    reduce_single(*pair, group=group)
        if self._alike is not None:
            share_first(self._alike.of(sources, outs), group)
        return DONE


class CollectiveTransport(Transport):
    """Standard collectives over the shard axis' group, on the current stream."""

    staging_bytes = STAGING_BYTES
    can_coalesce = True
    exchanges_on_stream = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """``device`` is where the tensors live."""
        self.group = group
        self.reduce_group = group
        self.rank = group.rank()
        self.size = group.size()
        backend = backend_of(group, device)
        planned = stands_for(backend)
        self.name = f"{planned or backend}-collectives"
        self._device = device
        self.coalesces = planned == dist.Backend.NCCL or coalesces(group, device)

    def together(self, group: dist.ProcessGroup) -> AbstractContextManager[Any]:
        """Launch the block's collectives on ``group`` at once where the backend can."""
        return coalescing(group, self._device) if self.coalesces else nullcontext()

    @override
    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> CollectiveGather:
        return CollectiveGather(pieces, self, tag)

    @override
    def reduce_route(
        self, extents: Sequence[Extents], dtype: torch.dtype, tag: int
    ) -> CollectiveReduce:
        del tag  # collectives pair by order
        return CollectiveReduce(extents, dtype, self)

    @override
    def owner_route(self, dtype: torch.dtype, tag: int) -> CollectiveOwner:
        del tag  # collectives pair by order
        return CollectiveOwner(self.reduce_group, dtype)

    @override
    def block(self, size: int) -> CollectiveTransport:
        """A process group of the block's ranks, shared by all groups that ask for it."""
        ranks = dist.get_process_group_ranks(self.group)
        first = self.rank // size * size
        members = ranks[first : first + size]
        return CollectiveTransport(shared_group(members, "block", self.group), self._device)

    @override
    def separate_reductions(self, enable: bool) -> None:
        """One more process group of the same ranks, shared by all groups that ask for it."""
        ranks = dist.get_process_group_ranks(self.group)
        self.reduce_group = shared_group(ranks, "reductions", self.group) if enable else self.group

    @override
    def exchange(self, payloads: Tensor, received: Tensor) -> Pending:
        dist.all_to_all_single(received, payloads, group=self.reduce_group)
        return DONE
