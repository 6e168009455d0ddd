"""Which part of a tensor this rank has.

[Note: pieces]
A data axis cuts rows, and how many ranks it has may change from run to run. Tensor parallelism
divides a tensor into *pieces* before that, as many in all runs that are compared. So a piece is
what a whole tensor is elsewhere: its rows are cut, its shape is what rows are counted in, and what
is made of pieces (a norm) is put together in the order of the axes that divided them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from polyshard._torch.private import is_strided
from polyshard.plugins.seams import local_of
from polyshard.sharding.layout import chunk_bounds

CHUNK_NUMEL = 1 << 15
"""Elements of 8 bytes that stay in the cache of a core."""


@dataclass(frozen=True)
class Axis:
    """An axis of a mesh, and where this rank is on it."""

    mesh: DeviceMesh
    index: int

    @property
    def group(self) -> dist.ProcessGroup:
        """Its ranks."""
        return self.mesh.get_group(self.index)

    @property
    def size(self) -> int:
        """How many they are."""
        return self.mesh.size(self.index)

    @property
    def rank(self) -> int:
        """Of this process among them."""
        return self.mesh.get_local_rank(self.index)


@dataclass(frozen=True)
class Cut:
    """The local part begins at index ``start`` of ``dim``; ranks of ``axis`` have the others."""

    dim: int
    start: int
    axis: Axis


@dataclass(frozen=True, eq=False)
class Part:
    """A local tensor, and where it is in the whole one, or in a piece of it. See [Note: pieces].

    Attributes:
        local: what is here.
        shape: of what was cut: the whole, or this rank's piece.
        cut: where it is cut; ``None`` for what is here whole.
        pieces: the axes that divide the whole into pieces, in order.
    """

    local: Tensor
    shape: tuple[int, ...]
    cut: Cut | None = None
    pieces: tuple[Axis, ...] = ()


def part_of(tensor: Tensor) -> Part | None:
    """What this rank has of ``tensor``; ``None`` where it is no rows of one dim of a piece.

    Of a ``DTensor`` the first axis that divides it cuts rows, and all others made pieces before,
    as sharded parameters are placed.
    """
    if not isinstance(tensor, DTensor):
        return Part(tensor, tuple(tensor.shape))
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    dividing = [a for a, p in enumerate(placements) if not p.is_replicate()]
    if not dividing:
        return Part(local_of(tensor), tuple(tensor.shape))
    first, *others = (placements[a] for a in dividing)
    pieces = [p for p in others if type(p) is Shard]
    if not (is_strided(first) or isinstance(first, Shard)) or len(pieces) < len(others):
        return None
    dim: int = first.dim  # type: ignore[attr-defined]  # of either class
    axes = [Axis(mesh, a) for a in dividing]
    along = [a.size for a, p in zip(axes[1:], pieces, strict=True) if p.dim == dim]
    if math.prod(along) != getattr(first, "split_factor", 1):
        return None  # rows were cut first, so that pieces are other ones on more ranks
    shape = _piece(tuple(tensor.shape), [p.dim for p in pieces], axes[1:])
    start, _ = chunk_bounds(shape[dim], axes[0].size, axes[0].rank)
    divided = tuple(axis for axis in axes[1:] if axis.size > 1)
    return Part(local_of(tensor), shape, Cut(dim, start, axes[0]), divided)


def _piece(shape: tuple[int, ...], dims: Sequence[int], axes: Sequence[Axis]) -> tuple[int, ...]:
    """The shape of what ``axes`` leave this rank of a tensor of ``shape``."""
    left = list(shape)
    for dim, axis in zip(dims, axes, strict=True):
        start, stop = chunk_bounds(left[dim], axis.size, axis.rank)
        left[dim] = stop - start
    return tuple(left)


def few_rows(rows: Tensor) -> tuple[Tensor, ...]:
    """A matrix in pieces of some rows each, about :data:`CHUNK_NUMEL` elements; one at least."""
    pieces: tuple[Tensor, ...] = rows.split(max(CHUNK_NUMEL // max(rows.shape[1], 1), 1))
    return pieces
