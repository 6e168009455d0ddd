"""Which rows of a parameter a rank holds: what placements say against what the engine cut.

[Note: rows]
A plugin that flattens a ``DTensor`` says what its sharded form is: a mesh of all axes, and
placements. The engine keeps rows of what the plugin flattened, whatever those placements say; if
they speak of other rows, training is right and every full tensor, gradient and checkpoint is in the
wrong order. ``DTensor`` reads placements from the left, so a dim that another axis had cut before
the engine did needs a strided placement on the data axis. Plain ones (as torch's own
``DTensorExtensions`` gives, which moves the rows accordingly) are replaced by those.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from polyshard._torch.private import is_strided, local_tensor, strided_shard
from polyshard.sharding.layout import chunk_bounds
from polyshard.sharding.placement import Placed

ALL_PLACES = 64
"""Ranks of a mesh up to which every one is looked at."""


def is_local_part(value: Tensor, given: Tensor) -> bool:
    """Whether ``value`` is what this rank holds of ``given``, element by element."""
    own = local_tensor(given) if isinstance(given, DTensor) else given
    if value.shape != own.shape or value.stride() != own.stride():
        return False
    same_storage = value.untyped_storage()._cdata == own.untyped_storage()._cdata
    return same_storage and value.storage_offset() == own.storage_offset()


def placements_of_rows(
    answer: DTensor, given: Tensor, placed: Placed
) -> tuple[Placement, ...] | None:
    """Placements on the mesh of ``answer`` that describe the rows the engine keeps of ``given``.

    Those of ``answer`` if they do; else the same ones made strided; ``None`` if neither does. The
    same on every rank. See [Note: rows].
    """
    mesh, found = answer.device_mesh, tuple(answer.placements)
    cuts = _cuts(given, placed, mesh)
    if cuts is None or answer.shape != given.shape:
        return None
    for placements in (found, _strided(found, mesh)):
        read = [_Cut(axis, placement) for axis, placement in enumerate(placements)]
        if all(_agree(given.shape, cuts, read, mesh, place) for place in _places(mesh)):
            return placements
    return None


@dataclass(frozen=True)
class _Cut:
    """One axis of a mesh, and what its ranks do with what they are given."""

    axis: int
    placement: Placement


def _cuts(given: Tensor, placed: Placed, mesh: DeviceMesh) -> list[_Cut] | None:
    """How ``given`` was cut, on axes of ``mesh``, and then by the engine; in that order."""
    cuts = []
    if isinstance(given, DTensor):
        axes = [
            _axis_of(mesh, given.device_mesh.get_group(a)) for a in range(len(given.placements))
        ]
        cuts = [(axis, p) for axis, p in zip(axes, given.placements, strict=True)]
    if placed.dim is not None:
        cuts.append((_axis_of(mesh, placed.roles.shard_group), Shard(placed.dim)))
    if any(axis is None and not isinstance(p, Replicate) for axis, p in cuts):
        return None
    return [_Cut(axis, p) for axis, p in cuts if axis is not None]


def _axis_of(mesh: DeviceMesh, group: dist.ProcessGroup) -> int | None:
    """The axis of ``mesh`` whose ranks are those of ``group``."""
    wanted = dist.get_process_group_ranks(group)
    for axis in range(mesh.ndim):
        if dist.get_process_group_ranks(mesh.get_group(axis)) == wanted:
            return axis
    return None


def _places(mesh: DeviceMesh) -> Iterator[tuple[int, ...]]:
    """Coordinates to compare at: all of a small mesh, else the first, middle and last ones."""
    sizes = tuple(mesh.mesh.shape)
    few = math.prod(sizes) <= ALL_PLACES
    every = [range(n) if few else sorted({0, 1 % n, n // 2, n - 1}) for n in sizes]
    return itertools.product(*every)


def _agree(
    shape: torch.Size,
    cuts: Sequence[_Cut],
    read: Sequence[_Cut],
    mesh: DeviceMesh,
    place: tuple[int, ...],
) -> bool:
    kept, held = _held(shape, cuts, mesh, place), _held(shape, read, mesh, place)
    return kept is not None and held is not None and all(map(torch.equal, kept, held))


def _held(
    shape: torch.Size, cuts: Sequence[_Cut], mesh: DeviceMesh, place: tuple[int, ...]
) -> list[Tensor] | None:
    """For each dim what the rank at ``place`` holds of it; ``None`` for other placements."""
    index = [torch.arange(size, device="cpu") for size in shape]
    for cut in cuts:
        placement = cut.placement
        if isinstance(placement, Replicate):
            continue
        if not is_strided(placement) and type(placement) is not Shard:
            return None
        pieces = getattr(placement, "split_factor", 1) if is_strided(placement) else 1
        dim: int = placement.dim  # type: ignore[attr-defined]
        size, rank = mesh.size(cut.axis), place[cut.axis]
        index[dim] = torch.cat([_chunk(p, size, rank) for p in index[dim].chunk(pieces)])
    return index


def _chunk(index: Tensor, world_size: int, rank: int) -> Tensor:
    start, stop = chunk_bounds(len(index), world_size, rank)
    return index[start:stop]


def _strided(placements: tuple[Placement, ...], mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Each shard on an axis before others that cut the same dim, as cut after those."""
    found = list(placements)
    for axis, placement in enumerate(placements):
        if type(placement) is not Shard:
            continue
        later = range(axis + 1, mesh.ndim)
        pieces = math.prod(mesh.size(a) for a in later if placements[a] == placement)
        if pieces > 1:
            found[axis] = strided_shard(placement.dim, pieces)
    return tuple(found)
