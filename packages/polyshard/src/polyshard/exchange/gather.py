"""How an all-gather fills the unsharded parameters: natively, or through a plugin's codec.

Everything that depends only on the plan (views, routes, copy lists) is made once; a gather is
``start``, a wait, and ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from polyshard.exchange.freshness import Freshness, Turn, differs
from polyshard.exchange.payload import payload_writer
from polyshard.exchange.pieces import extents_of, home_pairs
from polyshard.memory.buffers import Buffer
from polyshard.params.sharded import local_view
from polyshard.params.unsharded import Unsharded
from polyshard.plugins.validation import fitting, wordless
from polyshard.seams import BoundGatherCodec
from polyshard.transport.base import (
    Extents,
    GatherPiece,
    GatherRoute,
    Pending,
    ReduceRoute,
    Transport,
)


class Filling(Protocol):
    """A transfer that fills the regions of a group, from shards or from a block."""

    sent_bytes: int
    received_bytes: int

    def start(self, fetch: Callable[[], None]) -> Pending:
        """Begin the transfer; the unsharded buffer is acquired.

        ``fetch`` brings the shard to where it is read: called first, by paths that read it.
        """
        ...

    def finish(self) -> None:
        """Called after the pending transfer was waited for; the parameters are complete then."""
        ...


class GatherPath(Filling, Protocol):
    """How an all-gather fills the regions of a group from all shards."""

    @property
    def payload_bytes(self) -> int | None:
        """What one payload takes, where there are payloads."""
        ...

    def differs(self, fetch: Callable[[], None]) -> Tensor:
        """Whether this rank's shard is not what the parameters were gathered from (0-dim bool)."""
        ...


@dataclass(frozen=True)
class Line:
    """Where a group's transfers go: the transport, the group's tag, this rank on the shard axis."""

    transport: Transport
    tag: int
    rank: int

    def gather_route(self, pieces: Sequence[GatherPiece]) -> GatherRoute:
        """An all-gather of ``pieces`` bound to memory."""
        made = self.transport.gather_route(pieces, self.tag)
        return fitting(made, GatherRoute, self.transport, "gather_route")

    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype) -> ReduceRoute:
        """A reduce-scatter bound to the layout, with sums in ``dtype``."""
        made = self.transport.reduce_route(extents, dtype, self.tag)
        return fitting(made, ReduceRoute, self.transport, "reduce_route")


class _Copies:
    """Copies made together, in one call."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def add(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            self._targets.append(target)
            self._sources.append(source)

    def run(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


class NativeGather:
    """Chunks go straight from shards into regions; staged ones through one packed transfer."""

    payload_bytes = None

    def __init__(self, unsharded: Unsharded, line: Line) -> None:
        """Bind pieces and copies; the unsharded buffer must be acquired."""
        layout, shard = unsharded.layout, unsharded.shard_view()
        self._own = list(_own_chunks(unsharded, line.rank))
        extents = extents_of(layout)
        pieces = [
            GatherPiece(
                shard[placed.shard_offset : placed.shard_offset + placed.chunk_numel],
                unsharded.region(index),
                extents[number],
            )
            for number, index in enumerate(layout.direct)
            for placed in (layout.parameters[index],)
        ]
        self._staging: Buffer | None = None
        self._copies = _Copies()
        if layout.staged:
            self._staging = unsharded.scratch(layout.world_size * layout.staged_numel)
            rows = self._staging.tensor.view(layout.world_size, layout.staged_numel)
            pieces.append(GatherPiece(shard[layout.staged_offset :], rows, extents[-1]))
            for index in layout.staged:
                placed = layout.parameters[index]
                start = placed.shard_offset - layout.staged_offset
                own = rows[:, start : start + placed.chunk_numel]
                self._copies.add(home_pairs(unsharded.home(index), own, placed, line.rank))
        self._route: GatherRoute = line.gather_route(pieces)
        if self._staging is not None:
            self._staging.release()
        self.sent_bytes = self._route.sent_bytes
        self.received_bytes = self._route.received_bytes

    def start(self, fetch: Callable[[], None]) -> Pending:
        """Post the transfers of all pieces."""
        fetch()
        if self._staging is not None:
            self._staging.acquire()
        return self._route.start()

    def finish(self) -> None:
        """Copy staged parameters home."""
        if self._staging is not None:
            self._copies.run()
            self._staging.release()

    def differs(self, fetch: Callable[[], None]) -> Tensor:
        """Compare the shard with this rank's part of the parameters, which is a copy of it."""
        fetch()
        return differs(self._own)


def _own_chunks(unsharded: Unsharded, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Per parameter this rank's part of it and of the shard, where they are not the same memory."""
    shard = unsharded.shard_view()
    for index, placed in enumerate(unsharded.layout.parameters):
        part, original = unsharded.home(index), local_view(shard, placed, rank)
        if placed.dim is not None:
            start, stop = placed.bounds(rank)
            part = part.narrow(placed.dim, start, stop - start)
        if original.numel() and part.data_ptr() != original.data_ptr():
            yield part, original


class CodecGather:
    """One payload per rank, decoded into the regions."""

    def __init__(
        self, codec: BoundGatherCodec, unsharded: Unsharded, line: Line, turn: Turn
    ) -> None:
        """Bind payloads and rows; the unsharded buffer must be acquired."""
        layout = unsharded.layout
        world, nbytes = layout.world_size, codec.payload_bytes
        self._codec: Any = codec  # its answer is looked at, though it should have none
        self.payload_bytes = nbytes
        self._shard = unsharded.shard_view()
        self._copies = _Copies()
        self._rows: list[Tensor] = []
        for index, placed in enumerate(layout.parameters):
            if not placed.staged:
                self._rows.append(unsharded.region(index))
                continue
            row = unsharded.buffer.tensor.new_empty(world, placed.chunk_numel)
            self._rows.append(row)
            self._copies.add(home_pairs(unsharded.home(index), row, placed, line.rank))
        keeps = codec.keeps_payload
        self._freshness = Freshness(self._shard, unsharded.versions, turn) if keeps else None
        self._is_near = unsharded.rests_near
        self._scratch = unsharded.scratch((world if keeps else world + 1) * nbytes, torch.uint8)
        self._received = self._scratch.tensor[: world * nbytes].view(world, nbytes)
        self._payload = (
            self._scratch.tensor.new_empty(nbytes)
            if keeps
            else self._scratch.tensor[world * nbytes :]
        )
        self._writer = payload_writer(codec, self._shard, self._payload)
        extents = Extents(nbytes, (nbytes,) * world)
        piece = GatherPiece(self._payload, self._received, extents)
        self._route = line.gather_route([piece])
        self._scratch.release()
        self.sent_bytes = self._route.sent_bytes
        self.received_bytes = self._route.received_bytes

    def resends(self) -> bool:
        """Whether a gather now would send the kept payload, without having the shard fetched."""
        return self._freshness is not None and self._freshness.is_current(is_near=self._is_near)

    def start(self, fetch: Callable[[], None]) -> Pending:
        """Encode what changed, and send."""
        self._scratch.acquire()
        if not self.resends():
            fetch()
            self._encode()
        return self._route.start()

    def _encode(self) -> None:
        if self._freshness is None:
            self._writer.write()
        elif not self._freshness.is_current(is_near=True):
            self._freshness.forget()  # should encoding fail, the payload is no payload any more
            self._writer.write()
            self._freshness.note()

    def finish(self) -> None:
        """Decode everybody's payload, the own one too."""
        wordless(self._codec.decode(self._received, self._rows), self._codec, "decode")
        self._copies.run()
        self._scratch.release()

    def differs(self, fetch: Callable[[], None]) -> Tensor:
        """Whether the shard is not what the payload was encoded from; unknown without a kept one.

        What was decoded says nothing: another shard may decode to the same.
        """
        if self._freshness is None or self.resends():
            return torch.tensor(self._freshness is None, device="cpu")
        fetch()
        return torch.tensor(not self._freshness.is_current(is_near=True), device="cpu")
