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

Every tag also says in which turn (outermost forward) its ranks are: messages of ranks whose control
flow differs do not meet, so that no rank computes with weights of another step.
"""

from __future__ import annotations

import copy
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
    Turn,
)
from polyshard.transport.gloo.messages import Message, Works, exchange_over, in_turn
from polyshard.transport.gloo.owners import GlooOwner
from polyshard.transport.gloo.wire import wire_of

STAGING_BYTES = 64 << 10
"""Measured on loopback: a message costs about as much as copying this many bytes twice."""


class GlooGather(GatherRoute):
    """See [Note: gloo point to point]."""

    def __init__(self, pieces: Sequence[GatherPiece], transport: GlooTransport, tag: int) -> None:
        """Slice every region and source once. Regions have a row for each rank taking part."""
        rank, world, members = transport.rank, transport.size, transport.members
        peers = [(rank + step) % world for step in range(1, world)]
        self._transport = transport
        self._tag = tag
        self._casts = any(p.source.dtype != p.region.dtype for p in pieces)
        self._own = [p.region[rank][: p.extents.numels[rank]] for p in pieces]
        self._sources = [p.source[: p.extents.numels[rank]] for p in pieces]
        outgoing = self._own if self._casts else self._sources
        self._receives = [
            Message([p.region[peer][: p.extents.numels[peer]]], members[peer])
            for peer in peers
            for p in pieces
            if p.extents.numels[peer]
        ]
        self._sends = [Message([t], members[peer]) for peer in peers for t in outgoing if t.numel()]
        self.sent_bytes = sum(m.tensors[0].nbytes for m in self._sends)
        self.received_bytes = sum(m.tensors[0].nbytes for m in self._receives)

    @override
    def start(self) -> Pending:
        """Post receives, then sends; put the own chunk in place while they run."""
        works = self._transport.begin(self._tag)
        works.post("recv", self._receives)
        if self._casts:
            torch._foreach_copy_(self._own, self._sources)
        works.post("send", self._sends)
        if not self._casts:
            torch._foreach_copy_(self._own, self._sources)
        return works


class GlooReduce(ReduceRoute):
    """See [Note: gloo point to point]."""

    def __init__(
        self, extents: Sequence[Extents], dtype: torch.dtype, transport: GlooTransport, tag: int
    ) -> None:
        """``dtype`` is the dtype of the sums."""
        self._extents = tuple(extents)
        self._dtype = dtype
        self._transport = transport
        self._tag = tag
        self._rank, self._world = transport.rank, transport.size
        self._peers = [peer for peer in range(self._world) if peer != self._rank]
        self._sum: type[_Sum] = _Sum

    @override
    def in_tree(self) -> GlooReduce | None:
        if self._world & (self._world - 1):
            return None
        made = copy.copy(self)
        made._sum = _TreeSum
        return made

    @override
    def sent_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """All rows but the own ones."""
        return sum(
            (source.numel() - extents.numels[self._rank]) * source.itemsize
            for source, extents in zip(sources, self._extents, strict=True)
            if source is not None
        )

    @override
    def received_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """The own rows of each peer."""
        return sum(
            len(self._peers) * extents.numels[self._rank] * source.itemsize
            for source, extents in zip(sources, self._extents, strict=True)
            if source is not None
        )

    @override
    def scratch_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """What arrives beside the sum, which the first peer's is written to where dtypes allow."""
        return sum(
            (len(self._peers) - (s.dtype == self._dtype)) * e.numels[self._rank] * s.itemsize
            for s, e in zip(sources, self._extents, strict=True)
            if s is not None
        )

    @override
    def start(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Pending:
        """Post everything; the sums are made in :meth:`_Sum.wait`."""
        own: list[Tensor] = []
        targets: list[Tensor] = []
        outgoing: list[Sequence[Tensor]] = []
        is_whole = True
        for source, out, extents in zip(sources, outs, self._extents, strict=True):
            if source is None:
                is_whole = False
                continue
            chunks = source.split(extents.chunk_numel) if extents.chunk_numel else (source,)
            outgoing.append(chunks)
            real = extents.numels[self._rank]
            if real:
                own.append(chunks[self._rank])
                targets.append(out if real == extents.chunk_numel else out[:real])
        works = self._transport.begin(self._tag if is_whole else self._tag_of(sources))
        # The first peer writes into the sum itself, where dtypes allow; what travels has one.
        into_sum = bool(own) and own[0].dtype == self._dtype
        arrivals: list[list[Tensor]] = []
        receives: list[Message] = []
        sends: list[Message] = []
        for index, peer in enumerate(self._peers):
            arriving = targets if into_sum and index == 0 else list(map(torch.empty_like, own))
            arrivals.append(arriving)
            for tensor in arriving:
                receives.append(Message([tensor], peer))
            for chunks in outgoing:
                if peer < len(chunks) and chunks[peer].numel():
                    sends.append(Message([chunks[peer]], peer))
        works.post("recv", receives)
        works.post("send", sends)
        return self._sum(works, self._rank, own, targets, arrivals)

    def _tag_of(self, sources: Sequence[object]) -> int:
        """Of a reduction in which only some pieces, those that are not ``None``, travel."""
        absent = [index for index, source in enumerate(sources) if source is None]
        if not absent:
            return self._tag
        return (zlib.crc32(f"{self._tag} {absent}".encode()) >> 2) * 2 + 1

    @override
    def answer(self, peer: int, takes_part: Sequence[bool], dtype: torch.dtype) -> Pending:
        works = self._transport.begin(self._tag_of([part or None for part in takes_part]))
        for extents in (e for e, present in zip(self._extents, takes_part, strict=True) if present):
            mine, theirs = extents.numels[self._rank], extents.numels[peer]
            if mine:
                works.post("recv", [Message([torch.empty(mine, dtype=dtype, device="cpu")], peer)])
            if theirs:
                works.post(
                    "send", [Message([torch.zeros(theirs, dtype=dtype, device="cpu")], peer)]
                )
        return works


@dataclass
class _Sum:
    """Adds arrivals in rank order, so that results depend neither on timing nor on the rank.

    ``arrivals[0]`` is ``targets`` itself when dtypes allow: the first peer writes into the sum.
    """

    works: Works
    rank: int
    own: list[Tensor]
    targets: list[Tensor]
    arrivals: list[list[Tensor]]

    def wait(self) -> None:
        """Wait for all arrivals, and add."""
        self.works.wait()
        if self.targets:
            self.add()

    def add(self) -> None:
        """Sum what has arrived into the targets."""
        first, *rest = self.arrivals
        if first is not self.targets:
            torch._foreach_copy_(self.targets, first)
        # Ranks 0 and 1 both start from g0 + g1, which commutes; later ones come in their turn.
        position = max(self.rank - 1, 0)
        for term in (*rest[:position], self.own, *rest[position:]):
            torch._foreach_add_(self.targets, term)


@dataclass
class _TreeSum(_Sum):
    """Adds neighbours first; in memory of arrivals, or, where those are narrower, in wider."""

    @override
    def add(self) -> None:
        leaves = [*self.arrivals[: self.rank], self.own, *self.arrivals[self.rank :]]
        total = self._sum_of(leaves)
        if total is not self.targets:
            torch._foreach_copy_(self.targets, total)

    def _sum_of(self, leaves: list[list[Tensor]]) -> list[Tensor]:
        if len(leaves) == 1:
            return leaves[0]
        half = len(leaves) // 2
        left, right = self._sum_of(leaves[:half]), self._sum_of(leaves[half:])
        if left is self.own:  # what autograd wrote is not ours to change
            left, right = right, left
        if left[0].dtype != self.targets[0].dtype:
            left = [tensor.to(self.targets[0].dtype) for tensor in left]
        torch._foreach_add_(left, right)
        return left


class GlooTransport(Transport):
    """Point-to-point over the shard axis' gloo group."""

    name = "gloo-p2p"
    staging_bytes = STAGING_BYTES

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int] | None = None) -> None:
        """``group`` must run on gloo; ``members`` are the ranks in it, all unless a block."""
        self._group = group
        self._turns = Turn()
        self.wire = wire_of(group)
        self.members = tuple(members) if members is not None else tuple(range(group.size()))
        self.rank = self.members.index(group.rank())
        self.size = len(self.members)

    def begin(self, tag: int) -> Works:
        """A transfer of ``tag`` in this turn."""
        return Works(self.wire, in_turn(tag, self._turns.count))

    @override
    def use_turns(self, turns: Turn) -> None:
        self._turns = turns

    @override
    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> GlooGather:
        return GlooGather(pieces, self, 2 * tag)

    @override
    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> GlooReduce:
        assert self.size == self._group.size(), "a block does not reduce"
        return GlooReduce(extents, dtype, self, 2 * tag + 1)

    @override
    def owner_route(self, dtype: torch.dtype, tag: int) -> GlooOwner:
        del dtype  # sums are made where they are kept
        return GlooOwner(self.wire, self.rank, self.size, tag)

    @override
    def block(self, size: int) -> GlooTransport:
        """Some ranks of the same group: messages need no group of their own."""
        first = self.rank // size * size
        made = GlooTransport(self._group, self.members[first : first + size])
        made.use_turns(self._turns)
        return made

    @override
    def exchange(self, payloads: Tensor, received: Tensor) -> Pending:
        return exchange_over(self.wire, payloads, received)
