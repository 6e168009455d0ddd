"""Point-to-point transfers over gloo: read where a shard rests, write where it is used.

[Note: gloo point to point]
gloo's own all-gather and reduce-scatter stage everything through internal buffers and run step by
step; sending each chunk straight from its shard into its peer's region takes a third of the time
for the same bytes (see docs/explanation/performance.md). Sends and receives of a group carry one
tag and are posted in piece order on every rank, so they pair first in, first out; other groups and
the user's own traffic have other tags, so no order between groups is assumed.

A reduction is the mirror image: chunk ``j`` of a gradient goes to rank ``j`` from where autograd
wrote it, and each rank sums what it receives. Because the sum is local, a gradient travels in its
own dtype and is added in the reduction's: bf16 gradients reduced in fp32 cost bf16 bytes, with the
same bits as if they had been cast first. Gradients that this rank does not have are not sent. So
that a peer which has them does not take others for them, the tag then says which pieces travel.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from polyshard.transport.base import (
    Extents,
    GatherPiece,
    GatherRoute,
    Pending,
    ReduceRoute,
    Transport,
)

STAGING_BYTES = 64 << 10
"""Measured on loopback: a message costs about as much as copying this many bytes twice."""


class Works:
    """Sends and receives in flight, with what keeps their memory alive."""

    def __init__(self, works: list[dist.Work], keep: object = None) -> None:
        """Hold ``keep`` until the transfers end."""
        self._works = works
        self._keep = keep

    def wait(self) -> None:
        """Wait for receives first, then for sends (the order they were posted in)."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._keep = None


@dataclass(frozen=True)
class _Message:
    tensors: list[Tensor]
    peer: int


class GlooGather(GatherRoute):
    """See [Note: gloo point to point]."""

    def __init__(
        self,
        pieces: Sequence[GatherPiece],
        group: dist.ProcessGroup,
        tag: int,
        members: Sequence[int],
    ) -> None:
        """Slice every region and source once; ``members`` are the ranks in ``group`` taking part.

        Regions have a row for each member.
        """
        rank, world = members.index(group.rank()), len(members)
        peers = [(rank + step) % world for step in range(1, world)]
        self._group = group
        self._tag = tag
        self._casts = any(p.source.dtype != p.region.dtype for p in pieces)
        self._own = [p.region[rank][: p.extents.numels[rank]] for p in pieces]
        self._sources = [p.source[: p.extents.numels[rank]] for p in pieces]
        outgoing = self._own if self._casts else self._sources
        self._receives = [
            _Message([p.region[peer][: p.extents.numels[peer]]], members[peer])
            for peer in peers
            for p in pieces
            if p.extents.numels[peer]
        ]
        self._sends = [
            _Message([t], members[peer]) for peer in peers for t in outgoing if t.numel()
        ]
        self.sent_bytes = sum(m.tensors[0].nbytes for m in self._sends)
        self.received_bytes = sum(m.tensors[0].nbytes for m in self._receives)

    @override
    def start(self) -> Pending:
        """Post receives, then sends; put the own chunk in place while they run."""
        group, tag = self._group, self._tag
        works = [group.recv(m.tensors, m.peer, tag) for m in self._receives]
        if self._casts:
            torch._foreach_copy_(self._own, self._sources)
        works += [group.send(m.tensors, m.peer, tag) for m in self._sends]
        if not self._casts:
            torch._foreach_copy_(self._own, self._sources)
        return Works(works)


class GlooReduce(ReduceRoute):
    """See [Note: gloo point to point]."""

    def __init__(
        self, extents: Sequence[Extents], dtype: torch.dtype, group: dist.ProcessGroup, tag: int
    ) -> None:
        """``dtype`` is the dtype of the sums."""
        self._extents = tuple(extents)
        self._dtype = dtype
        self._group = group
        self._tag = tag
        self._rank, self._world = group.rank(), group.size()
        self._peers = [peer for peer in range(self._world) if peer != self._rank]

    @override
    def sent_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """All rows but the own ones."""
        return sum(
            (source.numel() - extents.numels[self._rank]) * source.itemsize
            for source, extents in zip(sources, self._extents, strict=True)
            if source is not None
        )

    @override
    def start(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Pending:
        """Post everything; the sums are made in :meth:`_Sum.wait`."""
        own: list[Tensor] = []
        targets: list[Tensor] = []
        outgoing: list[Sequence[Tensor]] = []
        for source, out, extents in zip(sources, outs, self._extents, strict=True):
            if source is None:
                continue
            chunks = source.split(extents.chunk_numel) if extents.chunk_numel else (source,)
            outgoing.append(chunks)
            real = extents.numels[self._rank]
            if real:
                own.append(chunks[self._rank])
                targets.append(out if real == extents.chunk_numel else out[:real])
        arrivals = [self._arrivals(own, targets, i) for i in range(len(self._peers))]
        works = self._post(
            arrivals, outgoing, self._tag_of([source is not None for source in sources])
        )
        return _Sum(works, self._rank, own, targets, arrivals)

    def _arrivals(self, own: list[Tensor], targets: list[Tensor], index: int) -> list[Tensor]:
        """Where the peer at ``index`` writes: into the sum itself if it comes first."""
        if index == 0 and all(o.dtype == self._dtype for o in own):
            return targets
        return [torch.empty_like(o) for o in own]

    def _tag_of(self, takes_part: Sequence[bool]) -> int:
        absent = [index for index, present in enumerate(takes_part) if not present]
        if not absent:
            return self._tag
        return (zlib.crc32(f"{self._tag} {absent}".encode()) >> 2) * 2 + 1

    @override
    def answer(self, peer: int, takes_part: Sequence[bool], dtype: torch.dtype) -> Pending:
        group, tag = self._group, self._tag_of(takes_part)
        works: list[dist.Work] = []
        kept: list[Tensor] = []
        for extents in (e for e, present in zip(self._extents, takes_part, strict=True) if present):
            mine, theirs = extents.numels[self._rank], extents.numels[peer]
            if mine:
                kept.append(torch.empty(mine, dtype=dtype))
                works.append(group.recv([kept[-1]], peer, tag))
            if theirs:
                kept.append(torch.zeros(theirs, dtype=dtype))
                works.append(group.send([kept[-1]], peer, tag))
        return Works(works, kept)

    def _post(
        self, arrivals: list[list[Tensor]], outgoing: list[Sequence[Tensor]], tag: int
    ) -> list[dist.Work]:
        group = self._group
        works = [
            group.recv([tensor], peer, tag)
            for peer, tensors in zip(self._peers, arrivals, strict=True)
            for tensor in tensors
        ]
        works += [
            group.send([chunks[peer]], peer, tag)
            for peer in self._peers
            for chunks in outgoing
            if peer < len(chunks) and chunks[peer].numel()
        ]
        return works


@dataclass
class _Sum:
    """Adds arrivals in rank order, so that results depend neither on timing nor on the rank.

    ``arrivals[0]`` is ``targets`` itself when dtypes allow: the first peer writes into the sum.
    """

    works: list[dist.Work]
    rank: int
    own: list[Tensor]
    targets: list[Tensor]
    arrivals: list[list[Tensor]]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()
        if not self.targets:
            return
        first, *rest = self.arrivals
        if first is not self.targets:
            torch._foreach_copy_(self.targets, first)
        # Ranks 0 and 1 both start from g0 + g1, which commutes; later ones come in their turn.
        position = max(self.rank - 1, 0)
        for term in (*rest[:position], self.own, *rest[position:]):
            torch._foreach_add_(self.targets, term)


class GlooTransport(Transport):
    """Point-to-point over the shard axis' gloo group."""

    name = "gloo-p2p"
    staging_bytes = STAGING_BYTES

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int] | None = None) -> None:
        """``group`` must run on gloo; ``members`` are the ranks in it, all unless a block."""
        self._group = group
        self._members = tuple(members) if members is not None else tuple(range(group.size()))
        self.rank = self._members.index(group.rank())
        self.size = len(self._members)

    @override
    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> GlooGather:
        return GlooGather(pieces, self._group, 2 * tag, self._members)

    @override
    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> GlooReduce:
        assert self.size == self._group.size(), "a block does not reduce"
        return GlooReduce(extents, dtype, self._group, 2 * tag + 1)

    @override
    def block(self, size: int) -> GlooTransport:
        """Some ranks of the same group: messages need no group of their own."""
        first = self.rank // size * size
        return GlooTransport(self._group, self._members[first : first + size])

    @override
    def exchange(self, payloads: Tensor, received: Tensor) -> Pending:
        work = dist.all_to_all_single(received, payloads, group=self._group, async_op=True)
        assert work is not None
        return Works([work], (payloads, received))
