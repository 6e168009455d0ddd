"""How parameters are gathered: the operations of each way, natively, by codec, or from a block.

Everything that depends only on the plan (views, routes, copy lists) is made once, when a program is
compiled. A gather by a tensor subclass is in :mod:`polyshard.program.tensor_protocol`.

[Note: blocks]
With ``reshard_after_forward=k`` the ranks of the shard axis form blocks of ``k`` consecutive ones,
and between forward and backward each block holds the parameters once. What a rank keeps is a slice
of the unsharded buffer itself, padding included: one contiguous copy, and in backward one transfer
of one piece straight back, whatever the parameters look like. The optimizer never sees it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.memory.buffers import Buffer, FixedBuffer
from polyshard.memory.streams import launched
from polyshard.params.parameter import Registry
from polyshard.params.sharded import Shards, local_view
from polyshard.params.unsharded import Unsharded
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import BoundGatherCodec, ShardStorage, overrides
from polyshard.plugins.validation import fitting, wordless
from polyshard.program.freshness import Freshness, differs
from polyshard.program.ops import Frame, Lane, Memory, Op, Program, Traffic, compiled
from polyshard.program.packing import extents_of, home_pairs
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import (
    DONE,
    Extents,
    GatherPiece,
    GatherRoute,
    ReduceRoute,
    Transport,
    Turn,
)


@dataclass(frozen=True)
class ShardAxis:
    """Where a group's transfers go: the transport, the group's tag, the mesh."""

    transport: Transport
    tag: int
    roles: MeshRoles

    @property
    def rank(self) -> int:
        """This rank on the shard axis."""
        return self.roles.shard_rank

    def gather_route(self, pieces: Sequence[GatherPiece]) -> GatherRoute:
        """An all-gather of ``pieces`` bound to memory."""
        made = self.transport.gather_route(pieces, self.tag)
        return fitting(made, GatherRoute, self.transport, "gather_route")

    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype) -> ReduceRoute:
        """A reduce-scatter bound to the layout, with sums in ``dtype``."""
        made = self.transport.reduce_route(extents, dtype, self.tag)
        return fitting(made, ReduceRoute, self.transport, "reduce_route")


class Gather(ABC):
    """One way to fill the unsharded parameters of a group."""

    route: GatherRoute
    payload_bytes: int | None = None
    """What one payload takes, where there are payloads."""
    codec: BoundGatherCodec | None = None
    """What makes payloads."""
    sources: tuple[Memory, ...] = (Memory.SHARD,)
    """What the transfer reads."""
    targets: tuple[Memory, ...] = (Memory.UNSHARDED,)
    reads_shard = True
    """Whether the shard is read, so that a storage has to bring it near."""
    kept_bytes: int = 0
    """Memory that is kept between runs."""

    @abstractmethod
    def scratch(self) -> Buffer | None:
        """Memory that is needed from start to end, beside the parameters."""

    def before(self, fetch: Op | None) -> list[Op]:
        """What comes between taking memory and the transfer; ``fetch`` brings the shard near."""
        return [] if fetch is None else [fetch]

    @property
    def lane(self) -> Lane:
        """Where the transfer runs."""
        return Lane.GATHER if self.route.on_stream else Lane.COMPUTE

    @abstractmethod
    def after(self) -> list[Op]:
        """What makes parameters of what arrived."""

    @abstractmethod
    def differs(self, fetch: Callable[[], None]) -> Tensor:
        """Whether this rank's shard is not what the parameters were gathered from (0-dim bool)."""

    def resends(self) -> bool:
        """Whether a gather now would send a kept payload, without having the shard fetched."""
        return False

    def transfer(self) -> Op:
        """The transfer itself."""
        route = self.route

        def start(frame: Frame) -> None:
            frame.pending = route.start()

        moved, taken = Traffic(route.sent_bytes, route.received_bytes), (route.scratch_bytes, 0)
        return Op(
            "gather",
            start,
            self.lane,
            self.sources,
            self.targets,
            join,
            lambda _: moved,
            lambda _: taken,
        )

    def join(self) -> Op:
        """What orders the rest behind the transfer."""
        freed = (0, self.route.scratch_bytes)
        return Op("join", join, reads=(*self.targets, *self.sources), memory=lambda _: freed)


def join(frame: Frame) -> None:
    """Wait for the transfer of a run, once."""
    pending, frame.pending = frame.pending, None
    if pending is not None and pending is not DONE:
        try:
            pending.wait()
        except BaseException:
            frame.is_torn = True
            raise


def unshard_program(
    gather: Gather,
    buffer: Buffer,
    shards: Shards,
    registry: Registry,
    fetch: Callable[[], None],
) -> Program:
    """Gather, and register the unsharded parameters.

    Who abandons a run releases ``buffer``.

    Args:
        gather: the way.
        buffer: of the unsharded parameters.
        shards: what is gathered.
        registry: registers the unsharded parameters.
        fetch: brings the shard near.
    """
    scratch = gather.scratch()

    def acquire(frame: Frame) -> None:
        del frame
        buffer.acquire()
        if scratch is not None:
            scratch.acquire()

    def release(frame: Frame) -> None:
        if scratch is not None and not frame.is_torn:
            scratch.release()

    storage = shards.storage
    own = 0 if isinstance(buffer, FixedBuffer) else buffer.nbytes
    nbytes = own + (0 if scratch is None else scratch.nbytes)
    # Strays are this rank's own (see [Note: changing hands] of the shards): others may have none.
    brings, has_strays = overrides(storage.fetch, DeviceStorage.fetch), shards.has_strays
    is_fetched = gather.reads_shard and (has_strays or brings)
    is_released = gather.reads_shard and overrides(storage.release, ShardStorage.release)
    taken = tuple(dict.fromkeys((Memory.UNSHARDED, *gather.targets)))
    fetching = Op(
        "fetch", lambda _: fetch(), gather.lane, writes=(Memory.SHARD,), is_own=not brings
    )
    issue = [
        Op("acquire", acquire, writes=taken, undo=release, memory=lambda _: (nbytes, 0)),
        *gather.before(fetching if is_fetched else None),
        gather.transfer(),
    ]
    complete = [gather.join(), *gather.after()]
    if is_released or is_fetched:
        # Where the transfer alone reads memory of its lane, that goes back once it is launched.
        at_once = storage.fetches_on_stream and Memory.SHARD in gather.sources
        lane = gather.lane if at_once else Lane.COMPUTE
        ops = complete if lane is Lane.COMPUTE else issue
        is_own = not (is_released or brings)
        written = (Memory.SHARD,)
        ops.append(Op("release", lambda _: shards.release(), lane, writes=written, is_own=is_own))
    complete.append(Op("register", registry.register, reads=(Memory.UNSHARDED,)))
    name = "unshard" if gather.reads_shard else "unshard from a block"
    return compiled(name, issue, complete)


# Native ---------------------------------------------------------------------------------------


def _together(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]] | None:
    """Targets and sources of copies that are made in one call; ``None`` without any."""
    return ([target for target, _ in pairs], [source for _, source in pairs]) if pairs else None


class NativeGather(Gather):
    """Chunks go straight from shards into regions; staged ones through one packed transfer."""

    def __init__(self, unsharded: Unsharded, axis: ShardAxis) -> None:
        """Bind pieces and copies; the unsharded buffer must be acquired."""
        layout, shard = unsharded.layout, unsharded.shard_view()
        self._own = list(_own_chunks(unsharded, axis.rank))
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
        homes: list[tuple[Tensor, Tensor]] = []
        if layout.staged:
            self.targets = (Memory.UNSHARDED, Memory.STAGING)
            self._staging = unsharded.scratch(layout.world_size * layout.staged_numel)
            rows = self._staging.tensor.view(layout.world_size, layout.staged_numel)
            pieces.append(GatherPiece(shard[layout.staged_offset :], rows, extents[-1]))
            for index in layout.staged:
                placed = layout.parameters[index]
                start = placed.shard_offset - layout.staged_offset
                own = rows[:, start : start + placed.chunk_numel]
                homes += home_pairs(unsharded.home(index), own, placed, axis.rank)
        self._copies = _together(homes)
        self.route = axis.gather_route(pieces)
        if self._staging is not None:
            self._staging.release()

    @override
    def scratch(self) -> Buffer | None:
        return self._staging

    @override
    def after(self) -> list[Op]:
        if self._staging is None:
            return []
        nbytes = self._staging.nbytes
        reads, writes = (Memory.STAGING,), (Memory.UNSHARDED,)
        return [Op("home", self._home, reads=reads, writes=writes, memory=lambda _: (0, nbytes))]

    def _home(self, frame: Frame) -> None:
        """Copy staged parameters home."""
        del frame
        assert self._staging is not None
        if self._copies is not None:
            torch._foreach_copy_(*self._copies)
        self._staging.release()

    @override
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


# By codec -------------------------------------------------------------------------------------


def _encode(codec: BoundGatherCodec, shard: Tensor, payload: Tensor) -> None:
    """Encode ``shard`` (``[shard_numel]``) into ``payload`` (``[payload_bytes]``, uint8)."""
    asked: Any = codec  # its answer is looked at, though it should have none
    wordless(asked.encode(shard, payload), codec, "encode")


def crossing(codec: BoundGatherCodec, shard: Tensor, payload: Tensor) -> Callable[[], None]:
    """What encodes a shard that stays on the host: only its payload moves to the accelerator.

    It moves from page-locked memory, so that the copy runs beside other work.
    """
    encoded = torch.empty(payload.numel(), dtype=torch.uint8, pin_memory=True, device="cpu")
    copied: Callable[[], None] | None = None

    def encode() -> None:
        nonlocal copied
        if copied is not None:  # the last copy has to have read what was encoded before
            copied()
        _encode(codec, shard, encoded)
        payload.copy_(encoded, non_blocking=True)
        copied = launched(payload.device)

    return encode


class CodecGather(Gather):
    """One payload per rank, decoded into the regions."""

    sources, targets = (Memory.PAYLOAD,), (Memory.PAYLOADS,)

    def __init__(
        self,
        codec: BoundGatherCodec,
        unsharded: Unsharded,
        axis: ShardAxis,
        turn: Turn,
        plugin: str,
    ) -> None:
        """Bind payloads and rows; the unsharded buffer must be acquired."""
        layout = unsharded.layout
        world, nbytes = layout.world_size, codec.payload_bytes
        self._codec: Any = codec  # its answer is looked at, though it should have none
        self.codec, self._plugin = codec, plugin
        self.payload_bytes = nbytes
        self._shard = unsharded.shard_view()
        self._rows: list[Tensor] = []
        homes: list[tuple[Tensor, Tensor]] = []
        for index, placed in enumerate(layout.parameters):
            if not placed.staged:
                self._rows.append(unsharded.region(index))
                continue
            row = unsharded.buffer.tensor.new_empty(world, placed.chunk_numel)
            self._rows.append(row)
            self.kept_bytes += row.nbytes
            homes += home_pairs(unsharded.home(index), row, placed, axis.rank)
        self._copies = _together(homes)
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
        self.kept_bytes += self._payload.nbytes if keeps else 0
        is_near = self._shard.device.type == self._payload.device.type
        given = (codec, self._shard, self._payload)
        self._write = partial(_encode, *given) if is_near else crossing(*given)
        extents = Extents(nbytes, (nbytes,) * world)
        self.route = axis.gather_route([GatherPiece(self._payload, self._received, extents)])
        self._scratch.release()

    @override
    def scratch(self) -> Buffer:
        return self._scratch

    @override
    def resends(self) -> bool:
        return self._freshness is not None and self._freshness.is_current(is_near=self._is_near)

    @override
    def before(self, fetch: Op | None) -> list[Op]:
        def encode(frame: Frame) -> None:
            if self.resends():
                return
            if fetch is not None:
                fetch.run(frame)
            self._encode()

        is_plain = fetch is None or fetch.is_own
        written = (Memory.PAYLOAD,) if is_plain else (Memory.PAYLOAD, Memory.SHARD)
        reads = (Memory.SHARD, Memory.PAYLOADS)
        return [Op("encode", encode, reads=reads, writes=written, plugin=self._plugin)]

    def _encode(self) -> None:
        if self._freshness is None:
            self._write()
        elif not self._freshness.is_current(is_near=True):
            self._freshness.forget()  # should encoding fail, the payload is no payload any more
            self._write()
            self._freshness.note()

    @override
    def after(self) -> list[Op]:
        reads, writes, by = (Memory.PAYLOADS,), (Memory.UNSHARDED,), self._plugin
        freed = (0, self._scratch.nbytes)
        return [
            Op(
                "decode",
                self._decode,
                reads=reads,
                writes=writes,
                memory=lambda _: freed,
                plugin=by,
            )
        ]

    def _decode(self, frame: Frame) -> None:
        """Decode everybody's payload, the own one too."""
        del frame
        wordless(self._codec.decode(self._received, self._rows), self._codec, "decode")
        if self._copies is not None:
            torch._foreach_copy_(*self._copies)
        self._scratch.release()

    @override
    def differs(self, fetch: Callable[[], None]) -> Tensor:
        """Whether the shard is not what the payload was encoded from; unknown without a kept one.

        What was decoded says nothing: another shard may decode to the same.
        """
        if self._freshness is None or self.resends():
            return torch.tensor(self._freshness is None, device="cpu")
        fetch()
        return torch.tensor(not self._freshness.is_current(is_near=True), device="cpu")


# From a block ---------------------------------------------------------------------------------


class Block(Gather):
    """One rank's slice of a group's unsharded buffer. See [Note: blocks]."""

    sources = (Memory.SLICE,)
    reads_shard = False

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
        self.route = transport.gather_route([piece], tag)
        held.release()
        self.holds = False

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the slice out, before the unsharded buffer is released."""
        self._held.acquire()
        self._held.tensor.copy_(self._slice)
        self.holds = True

    @override
    def scratch(self) -> None:
        return None

    @override
    def after(self) -> list[Op]:
        freed = (0, self._held.nbytes)
        writes = (Memory.SLICE,)
        return [Op("drop slice", lambda _: self.drop(), writes=writes, memory=lambda _: freed)]

    def drop(self) -> None:
        """Give the slice up."""
        self._held.release()
        self.holds = False

    @override
    def differs(self, fetch: Callable[[], None]) -> Tensor:
        raise AssertionError("what a block holds is compared with the shards' own gather")
