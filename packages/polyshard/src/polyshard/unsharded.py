"""The unsharded side of a group: one buffer of regions, the leaves over it, and how it is filled.

Reads [Note: layout] and [Note: stable storage]. Everything that depends only on the plan (views,
routes, copy lists) is made once here; a gather is ``start`` then ``finish``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from polyshard.buffers import Buffer, FixedBuffer, new_buffer
from polyshard.errors import PluginError
from polyshard.layout import GroupLayout, ParameterLayout
from polyshard.onion import Onion
from polyshard.pages import PagePool
from polyshard.seams import BoundGatherCodec
from polyshard.shards import Shards
from polyshard.transport.base import (
    Extents,
    GatherPiece,
    GatherRoute,
    Pending,
    Transport,
)


def extents_of(layout: GroupLayout) -> list[Extents]:
    """Pieces of a group's native transfers: each direct parameter, then the packed slice."""
    ranks = range(layout.world_size)
    pieces = [
        Extents(
            layout.parameters[i].chunk_numel,
            tuple(layout.parameters[i].local_numel(r) for r in ranks),
        )
        for i in layout.direct
    ]
    if layout.staged:
        pieces.append(Extents(layout.staged_numel, (layout.staged_numel,) * layout.world_size))
    return pieces


def chunk_pairs(full: Tensor, rows: Tensor, placed: ParameterLayout) -> list[tuple[Tensor, Tensor]]:
    """Views that correspond between a full parameter and its chunks.

    Args:
        full: the parameter or gradient (``placed.shape``).
        rows: ``[W, chunk_numel]``, one rank's chunk a row, possibly strided.
        placed: where it rests.

    Returns:
        Pairs (part of ``full``, part of ``rows``) of equal shapes that cover all real elements;
        for a replicated parameter one pair with every row expanded from ``full``.
    """
    world = placed.world_size
    if placed.dim is None:
        shape = (world, *placed.shape)
        return [(full.expand(shape), rows.view(shape))]
    if placed.dim == 0 and placed.is_even:
        return [(full.reshape(world, -1), rows)] if placed.numel else []
    pairs = []
    for rank in range(world):
        start, stop = placed.bounds(rank)
        if placed.local_numel(rank):
            part = rows[rank, : placed.local_numel(rank)].view(placed.local_shape(rank))
            pairs.append((full.narrow(placed.dim, start, stop - start), part))
    return pairs


class GatherPath(Protocol):
    """How an all-gather fills the regions of a group."""

    sent_bytes: int
    received_bytes: int

    def start(self) -> Pending:
        """Begin the transfer; the unsharded buffer is acquired."""
        ...

    def finish(self) -> None:
        """Called after the pending transfer was waited for; the parameters are complete then."""
        ...


class NativeGather:
    """Chunks go straight from shards into regions; staged ones through one packed transfer."""

    def __init__(
        self,
        shard: Tensor,
        regions: dict[int, Tensor],
        homes: dict[int, Tensor],
        layout: GroupLayout,
        route: tuple[Transport, int],
        staging: Buffer | None,
        rank: int,
    ) -> None:
        """Bind pieces and copy lists. ``regions`` are direct, ``homes`` staged parameters."""
        self._staging = staging
        extents = extents_of(layout)
        pieces = [
            GatherPiece(
                shard[p.shard_offset : p.shard_offset + p.chunk_numel], regions[i], extents[n]
            )
            for n, i in enumerate(layout.direct)
            for p in (layout.parameters[i],)
        ]
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        if staging is not None:
            rows = staging.tensor.view(layout.world_size, layout.staged_numel)
            pieces.append(GatherPiece(shard[layout.staged_offset :], rows, extents[-1]))
            for index, home in homes.items():
                self._bind_staged(home, rows, layout.parameters[index], layout, rank)
        transport, tag = route
        self._route: GatherRoute = transport.gather_route(pieces, tag)
        self.sent_bytes = self._route.sent_bytes
        self.received_bytes = self._route.received_bytes
        if staging is not None:
            staging.release()

    def _bind_staged(
        self, home: Tensor, rows: Tensor, placed: ParameterLayout, layout: GroupLayout, rank: int
    ) -> None:
        start = placed.shard_offset - layout.staged_offset
        own = rows[:, start : start + placed.chunk_numel]
        if placed.dim is None:  # every rank holds all of it: take our own row
            self._targets.append(home.view(-1))
            self._sources.append(own[rank])
            return
        for target, source in chunk_pairs(home, own, placed):
            self._targets.append(target)
            self._sources.append(source)

    def start(self) -> Pending:
        """Post the transfers of all pieces."""
        if self._staging is not None:
            self._staging.acquire()
        return self._route.start()

    def finish(self) -> None:
        """Copy staged parameters home."""
        if self._staging is not None:
            torch._foreach_copy_(self._targets, self._sources)
            self._staging.release()


class CodecGather:
    """One payload per rank, decoded into the regions."""

    def __init__(
        self,
        codec: BoundGatherCodec,
        shard: Tensor,
        rows: Sequence[Tensor],
        payloads: Buffer,
        route: tuple[Transport, int],
        copies: tuple[list[Tensor], list[Tensor]],
    ) -> None:
        """``rows``: each parameter's ``[W, chunk_numel]``; ``copies``: what is copied out after."""
        world = rows[0].shape[0]
        self._codec = codec
        self._shard = shard
        self._rows = rows
        self._payloads = payloads
        self._received = payloads.tensor[codec.payload_bytes :].view(world, codec.payload_bytes)
        self._payload = payloads.tensor[: codec.payload_bytes]
        self._copies = copies
        extents = Extents(codec.payload_bytes, (codec.payload_bytes,) * world)
        transport, tag = route
        self._route = transport.gather_route(
            [GatherPiece(self._payload, self._received, extents)], tag
        )
        self.sent_bytes = self._route.sent_bytes
        self.received_bytes = self._route.received_bytes
        payloads.release()

    def start(self) -> Pending:
        """Encode and send."""
        self._payloads.acquire()
        self._codec.encode(self._shard, self._payload)
        return self._route.start()

    def finish(self) -> None:
        """Decode everybody's payload, the own one too."""
        self._codec.decode(self._received, self._rows)
        targets, sources = self._copies
        if targets:
            torch._foreach_copy_(targets, sources)
        self._payloads.release()


class Unsharded:
    """The unsharded buffer of a group and the leaves registered while it is filled."""

    def __init__(
        self,
        shards: Shards,
        dtype: torch.dtype,
        device: torch.device,
        pool: PagePool | None,
        onion: Onion,
    ) -> None:
        """Make the buffer and the leaves; it stays acquired until the paths have taken views."""
        self._onion = onion
        layout = shards.layout
        self._shards = shards
        self._pool = pool
        self._device = device
        self.dtype = dtype
        self.buffer = self._new_buffer()
        self.buffer.acquire()
        self.leaves = [self._leaf(i) for i in range(len(layout.parameters))]

    def _new_buffer(self) -> Buffer:
        layout, shard = self._shards.layout, self._shards.buffer
        if layout.world_size == 1 and shard.dtype == self.dtype and shard.device == self._device:
            # A world of one computes with the shard itself: chunks and regions coincide.
            return FixedBuffer(shard)
        return new_buffer(layout.unsharded_numel, self.dtype, self._device, self._pool)

    def _leaf(self, index: int) -> nn.Parameter:
        placed = self._shards.layout.parameters[index]
        sharded = self._shards.parameters[index].parameter
        view = torch.empty(0, dtype=self.dtype, device=self._device)
        stride = torch.empty(placed.shape, device="meta").stride()
        storage = self.buffer.tensor.untyped_storage()
        offset = self.buffer.tensor.storage_offset() + placed.region_offset
        view.set_(storage, offset, placed.shape, stride)
        if self._onion:
            view = self._unflattened(view, index)
        leaf = nn.Parameter(view, requires_grad=sharded.requires_grad)
        leaf.__dict__.update(sharded.__dict__)
        return leaf

    def _unflattened(self, view: Tensor, index: int) -> Tensor:
        parameter = self._shards.parameters[index]
        with torch.no_grad():
            outer = self._onion.unflatten(view, parameter.extensions, parameter.info)
        if tuple(outer.shape) != parameter.info.shape:
            raise PluginError(
                f"plugins flattened '{parameter.info.fqn}' {parameter.info.shape} but unflattened "
                f"it to {tuple(outer.shape)}; post_unflatten_transform must undo "
                "pre_flatten_transform."
            )
        return outer

    def region(self, index: int) -> Tensor:
        """``[W, chunk_numel]`` of a direct parameter."""
        placed = self._shards.layout.parameters[index]
        flat = self.buffer.tensor[placed.region_offset : placed.region_offset + placed.region_numel]
        return flat.view(placed.world_size, placed.chunk_numel)

    def home(self, index: int) -> Tensor:
        """A staged parameter itself, in its shape."""
        placed = self._shards.layout.parameters[index]
        flat = self.buffer.tensor[placed.region_offset : placed.region_offset + placed.numel]
        return flat.view(placed.shape)

    def native_path(self, transport: Transport, tag: int, rank: int) -> NativeGather:
        """The engine's own transfer."""
        layout = self._shards.layout
        staging = None
        if layout.staged:
            numel = layout.world_size * layout.staged_numel
            staging = new_buffer(numel, self.dtype, self._device, self._pool)
            staging.acquire()
        return NativeGather(
            self._shards.storage.view(),
            {i: self.region(i) for i in layout.direct},
            {i: self.home(i) for i in layout.staged},
            layout,
            (transport, tag),
            staging,
            rank,
        )

    def codec_path(self, codec: BoundGatherCodec, transport: Transport, tag: int) -> CodecGather:
        """A plugin's codec decides what travels."""
        layout = self._shards.layout
        world = layout.world_size
        rows: list[Tensor] = []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, placed in enumerate(layout.parameters):
            if not placed.staged:
                rows.append(self.region(index))
                continue
            row = torch.empty(world, placed.chunk_numel, dtype=self.dtype, device=self._device)
            rows.append(row)
            if placed.dim is None:
                targets.append(self.home(index).view(-1))
                sources.append(row[0])
            else:
                for target, source in chunk_pairs(self.home(index), row, placed):
                    targets.append(target)
                    sources.append(source)
        payloads = new_buffer(
            (world + 1) * codec.payload_bytes, torch.uint8, self._device, self._pool
        )
        payloads.acquire()
        shard = self._shards.storage.view()
        return CodecGather(codec, shard, rows, payloads, (transport, tag), (targets, sources))
