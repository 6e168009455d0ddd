"""How an all-gather fills the unsharded parameters: natively, or through a plugin's codec.

Everything that depends only on the plan (views, routes, copy lists) is made once; a gather is
``start``, a wait, and ``finish``.

[Note: blocks]
With ``reshard_after_forward=k`` the ranks of the shard axis form blocks of ``k`` consecutive ones,
and between forward and backward each block holds the parameters once. What a rank keeps is a slice
of the unsharded buffer itself, padding included: one contiguous copy, and in backward one transfer
of one piece straight back, whatever the parameters look like. The optimizer never sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from polyshard.exchange.freshness import Freshness, Turn, differs
from polyshard.exchange.packing import extents_of, home_pairs
from polyshard.memory.buffers import Buffer
from polyshard.memory.streams import launched
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


class PayloadWriter(Protocol):
    """Fills the payload of one group."""

    def write(self) -> None:
        """Encode the shard."""
        ...


class NearWriter:
    """The shard is read where the payload is sent from."""

    def __init__(self, codec: BoundGatherCodec, shard: Tensor, payload: Tensor) -> None:
        """``shard`` is ``[shard_numel]``, ``payload`` ``[payload_bytes]`` ``uint8``."""
        self._codec: Any = codec  # its answer is looked at, though it should have none
        self._shard = shard
        self._payload = payload

    def write(self) -> None:
        """Encode straight into the payload."""
        wordless(self._codec.encode(self._shard, self._payload), self._codec, "encode")


class CrossingWriter:
    """The shard stays on the host: what moves to the accelerator is the payload."""

    def __init__(self, codec: BoundGatherCodec, shard: Tensor, payload: Tensor) -> None:
        """Page-locked memory for one payload, so that its copy runs beside other work."""
        self._codec: Any = codec
        self._shard = shard
        self._payload = payload
        self._encoded = torch.empty(
            payload.numel(), dtype=torch.uint8, pin_memory=True, device="cpu"
        )
        self._copied: Callable[[], None] | None = None

    def write(self) -> None:
        """Encode on the host, after the last copy has read what was encoded before; copy."""
        if self._copied is not None:
            self._copied()
        wordless(self._codec.encode(self._shard, self._encoded), self._codec, "encode")
        self._payload.copy_(self._encoded, non_blocking=True)
        self._copied = launched(self._payload.device)


def payload_writer(codec: BoundGatherCodec, shard: Tensor, payload: Tensor) -> PayloadWriter:
    """A writer for tensors on these devices."""
    if shard.device.type == payload.device.type:
        return NearWriter(codec, shard, payload)
    return CrossingWriter(codec, shard, payload)


class Block:
    """One rank's slice of a group's unsharded buffer. See [Note: blocks]."""

    def __init__(self, held: Buffer, unsharded: Tensor, transport: Transport, tag: int) -> None:
        """Bind the transfer; both buffers must be acquired.

        Args:
            held: ``[numel / k]``, where the slice rests.
            unsharded: the whole unsharded buffer, ``[numel]``.
            transport: among the ranks of the block.
            tag: of the group.
        """
        size = transport.size
        numel = unsharded.numel() // size
        self._held = held
        self._slice = unsharded.view(size, numel)[transport.rank]
        piece = GatherPiece(
            held.tensor, unsharded.view(size, numel), Extents(numel, (numel,) * size)
        )
        self._route = transport.gather_route([piece], tag)
        self.sent_bytes = self._route.sent_bytes
        self.received_bytes = self._route.received_bytes
        held.release()
        self.holds = False

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the slice out, before the unsharded buffer is released."""
        self._held.acquire()
        self._held.tensor.copy_(self._slice)
        self.holds = True

    def start(self, fetch: Callable[[], None]) -> Pending:
        """Begin to gather the unsharded buffer from the block; no shard is read."""
        del fetch
        return self._route.start()

    def finish(self) -> None:
        """The parameters are complete: the slice has done its work."""
        self.drop()

    def drop(self) -> None:
        """Give the slice up."""
        self._held.release()
        self.holds = False


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
