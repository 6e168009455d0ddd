"""How a layout is cut into transfers, and how staged parameters map onto packed rows."""

from __future__ import annotations

from torch import Tensor

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
        pieces.append(Extents(packed, (packed,) * layout.world_size))
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
