"""Which part of a tensor this rank has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from polyshard.seams import local_of
from polyshard.sharding.layout import chunk_bounds

CHUNK_NUMEL = 1 << 15
"""Elements of 8 bytes that stay in the cache of a core."""


@dataclass(frozen=True, eq=False)
class Part:
    """A local tensor, and where it is in the whole one.

    Attributes:
        local: what is here.
        shape: of the whole.
        cut: where it is cut; ``None`` for a whole tensor.
    """

    local: Tensor
    shape: tuple[int, ...]
    cut: Cut | None = None


@dataclass(frozen=True)
class Cut:
    """The local part begins at index ``start`` of ``dim``; an axis of ``mesh`` has the others."""

    dim: int
    start: int
    mesh: DeviceMesh
    axis: int


def part_of(tensor: Tensor) -> Part | None:
    """What this rank has of ``tensor``; ``None`` where it is no rows of one dim."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Part(tensor, shape)
    mesh, local = tensor.device_mesh, local_of(tensor)
    dividing = [a for a, p in enumerate(tensor.placements) if not p.is_replicate()]
    if not dividing:
        return Part(local, shape)
    axis, placement = dividing[0], tensor.placements[dividing[0]]
    if len(dividing) > 1 or not isinstance(placement, Shard):
        return None
    start, _ = chunk_bounds(shape[placement.dim], mesh.size(axis), mesh.get_local_rank(axis))
    return Part(local, shape, Cut(placement.dim, start, mesh, axis))


def few_rows(rows: Tensor) -> tuple[Tensor, ...]:
    """A matrix in pieces of some rows each, about :data:`CHUNK_NUMEL` elements; one at least."""
    pieces: tuple[Tensor, ...] = rows.split(max(CHUNK_NUMEL // max(rows.shape[1], 1), 1))
    return pieces
