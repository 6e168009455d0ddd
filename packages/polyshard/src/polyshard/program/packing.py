"""A group's gradients as what travels: pieces on the wire, chunks for a codec, parts of the sum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyshard._torch.private import chunk_cat
from polyshard.memory.buffers import Buffer, new_buffer
from polyshard.memory.pages import PagePool
from polyshard.program.accumulation import blanks
from polyshard.sharding.layout import GroupLayout, ParameterLayout
from polyshard.transport.base import Extents


def extents_of(layout: GroupLayout, *, reduced: bool = False) -> list[Extents]:
    """Pieces of a group's native transfers: each direct parameter, then the packed slice.

    That of a reduction (``reduced``) may be shorter.
    """
    ranks = range(layout.world_size)
    pieces = [
        Extents(
            layout.parameters[i].chunk_numel,
            tuple(layout.parameters[i].local_numel(r) for r in ranks),
        )
        for i in layout.direct
    ]
    if layout.staged:
        packed = layout.reduced_numel if reduced else layout.staged_numel
        whole = [layout.parameters[i] for i in layout.reduced if layout.parameters[i].dim is None]
        starts = [p.shard_offset - layout.staged_offset for p in whole]
        alike = [(s, s + p.chunk_numel) for s, p in zip(starts, whole, strict=True)]
        pieces.append(Extents(packed, (packed,) * layout.world_size, tuple(alike)))
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


def home_pairs(
    home: Tensor, rows: Tensor, placed: ParameterLayout, rank: int
) -> list[tuple[Tensor, Tensor]]:
    """(target, source) copies that bring a staged parameter home from its rows.

    A replicated parameter takes the row of ``rank``: every rank holds all of it.
    """
    if placed.dim is None:
        return [(home.view(-1), rows[rank])]
    return chunk_pairs(home, rows, placed)


@dataclass(frozen=True)
class Averaging:
    """How sums become means: divide every source by ``before``, the sum by ``after``."""

    before: float
    after: float

    @classmethod
    def of(cls, divisor: float, dtype: torch.dtype) -> Averaging:
        """Split ``divisor`` around the sum where the sum could overflow (fp16)."""
        if dtype is not torch.float16:
            return cls(1.0, divisor)
        before = 1.0
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return cls(before, divisor / before)

    def sources_of(self, gradients: dict[int, Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        """What is sent of gradients: their own memory, which is read only, or copies.

        A copy takes the place of its gradient, which callers further up hold: it is freed before
        the next is copied.
        """
        for index, gradient in gradients.items():
            source = gradient if gradient.dtype == dtype else gradient.to(dtype)
            if source.is_conj() or source.is_neg():  # what travels is memory
                source = source.resolve_conj().resolve_neg()
            if not source.is_contiguous():
                source = source.contiguous()
            if self.before != 1.0:
                # Autograd may have given this memory to another parameter, or a user may hold it.
                is_own = source is not gradient
                source = source.div_(self.before) if is_own else source.div(self.before)
            gradients[index] = source
        return gradients


class Packing:
    """Maps gradients of one group to memory that is sent, and to memory that receives."""

    def __init__(self, layout: GroupLayout, rank: int, pool: PagePool | None) -> None:
        """``rank`` is that on the shard axis; buffers share pages through ``pool``."""
        self._layout = layout
        self._pool = pool
        self.scratch: Buffer | None = None
        """Freed, for :meth:`take_scratch`."""
        staged = [layout.parameters[i] for i in layout.reduced]
        self._fills_rows = all(p.is_even for p in staged) and (
            sum(p.chunk_numel for p in staged) == layout.reduced_numel
        )
        self._only_rows = self._fills_rows and all(p.dim == 0 and p.numel for p in staged)
        self._filled = [
            (p.shard_offset, p.shard_offset + p.local_numel(rank)) for p in layout.parameters
        ]
        self._out_spans = [
            (p.shard_offset, p.shard_offset + p.chunk_numel)
            for p in (layout.parameters[i] for i in layout.direct)
        ]
        if layout.staged:
            self._out_spans.append((layout.staged_offset, layout.reduced_stop))

    # What travels -----------------------------------------------------------------------------

    def pieces(
        self, sources: Mapping[int, Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor | None], Buffer | None]:
        """What is sent: direct gradients as they are, staged ones packed in a buffer."""
        layout = self._layout
        pieces: list[Tensor | None] = []
        for index in layout.direct:
            source = sources.get(index)
            pieces.append(None if source is None else source.view(-1))
        if not layout.staged:
            return pieces, None
        staged = {}
        for index in layout.reduced:
            if index in sources:
                staged[index] = sources[index]
        if not staged:
            return [*pieces, None], None
        world, numel = layout.world_size, layout.reduced_numel
        device = next(iter(staged.values())).device
        scratch = self.take_scratch(world * numel * dtype.itemsize, device)
        packed = scratch.tensor.view(dtype)
        self._pack(staged, packed.view(world, numel))
        return [*pieces, packed], scratch

    def takes_part(self, present: Callable[[int], bool]) -> list[bool]:
        """Which pieces travel when there are gradients of these parameters."""
        layout = self._layout
        direct = [present(i) for i in layout.direct]
        return [*direct, any(map(present, layout.reduced))] if layout.staged else direct

    def stand_ins(self, present: Collection[int], dtype: torch.dtype) -> list[Tensor | None]:
        """Pieces of the sizes that gradients of these parameters have, on the meta device."""
        layout = self._layout
        pieces: list[Tensor | None] = [
            torch.empty(layout.parameters[i].numel, dtype=dtype, device="meta")
            if i in present
            else None
            for i in layout.direct
        ]
        if layout.staged:
            numel = layout.world_size * layout.reduced_numel
            is_sent = any(i in present for i in layout.reduced)
            pieces.append(torch.empty(numel, dtype=dtype, device="meta") if is_sent else None)
        return pieces

    def _pack(self, staged: Mapping[int, Tensor], packed: Tensor) -> None:
        """Copy gradients into ``packed`` (``[W, reduced_numel]``); the rest is zero."""
        layout = self._layout
        is_whole = len(staged) == len(layout.reduced)
        if is_whole and self._only_rows:
            chunk_cat(list(staged.values()), packed)  # in the order of the layout
            return
        if not (is_whole and self._fills_rows):
            packed.zero_()
        targets: list[Tensor] = []
        parts: list[Tensor] = []
        for index, source in staged.items():
            placed = layout.parameters[index]
            start = placed.shard_offset - layout.staged_offset
            rows = packed[:, start : start + placed.chunk_numel]
            for part, target in chunk_pairs(source, rows, placed):
                parts.append(part)
                targets.append(target)
        if targets:
            torch._foreach_copy_(targets, parts)

    def chunks(self, sources: Mapping[int, Tensor], total: Tensor) -> list[Tensor]:
        """Each parameter's ``[W, chunk_numel]``, as codecs read them; in the dtype of ``total``."""
        return [
            self._rows(sources.get(index), placed, total)
            for index, placed in enumerate(self._layout.parameters)
        ]

    @staticmethod
    def _rows(source: Tensor | None, placed: ParameterLayout, total: Tensor) -> Tensor:
        """One gradient: its own memory where that is laid out so."""
        shape = (placed.world_size, placed.chunk_numel)
        if source is None:
            return total.new_zeros(1, 1).expand(shape)
        if placed.dim == 0 and placed.is_even and source.dtype == total.dtype:
            return source.view(shape)
        rows = total.new_zeros(shape)
        for part, target in chunk_pairs(source, rows, placed):
            target.copy_(part)
        return rows

    def take_scratch(self, nbytes: int, device: torch.device, *, is_shown: bool = False) -> Buffer:
        """Bytes for payloads or packed gradients, on pages that unsharded buffers gave up.

        ``is_shown``: to plugins, which could keep views of them.
        """
        scratch, self.scratch = self.scratch, None  # a second reduction in flight makes its own
        if scratch is None or scratch.nbytes != nbytes:
            scratch = new_buffer(nbytes, torch.uint8, device, self._pool, is_shown=is_shown)
        scratch.acquire()
        return scratch

    # What arrives -----------------------------------------------------------------------------

    def piece_outs(self, total: Tensor) -> list[Tensor]:
        """Where the sum of each piece belongs in ``total`` (``[shard_numel]``)."""
        outs = []
        for start, stop in self._out_spans:  # a loop, as everything that runs in every step
            outs.append(total[start:stop])
        return outs

    def chunk_outs(self, total: Tensor) -> list[Tensor]:
        """Where the sum of each parameter's chunks belongs."""
        return [
            total[p.shard_offset : p.shard_offset + p.chunk_numel] for p in self._layout.parameters
        ]

    def blanks(self, present: Sequence[int], *, packs: bool) -> list[tuple[int, int]]:
        """Half-open ranges of ``[0, shard_numel)`` that sums of these parameters leave as it was.

        ``packs`` says that staged ones arrive as one piece, with zeros between them.
        """
        layout = self._layout
        filled = [self._filled[i] for i in present]
        if packs and any(i in layout.reduced for i in present):
            filled.append((layout.staged_offset, layout.reduced_stop))
        return blanks(layout.shard_numel, filled)
