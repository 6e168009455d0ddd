"""Where every element of a parameter group rests: pure arithmetic, no tensors and no processes.

[Note: layout]
A group of ``W`` ranks owns, on each rank, one *shard buffer*: the rank's padded chunks end to end.
``torch.chunk`` semantics put all padding behind the last row, so for a parameter sharded on dim 0
the concatenation of its ``W`` padded chunks *starts with* the full, contiguous parameter. A
*region* of ``W`` padded chunks in the unsharded buffer is therefore at once the target of the
all-gather and the unsharded parameter: nothing is copied out.

Three kinds of parameters cannot be gathered straight into a region and are *staged*: those sharded
on another dim (their chunks interleave), replicated ones (0-dim: every rank holds all of it) and
small ones (one packed transfer is cheaper than many tiny ones). Their chunks lie side by side at
the end of the shard buffer, so that one contiguous slice of it is one transfer for all of them.

All sizes here are in elements unless a name says bytes. The plan preview, the byte counts and the
runtime use these same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT_BYTES = 64
"""Start of every chunk and region: a cache line, and four times what NCCL asks for."""

STAGED_ALIGNMENT_BYTES = 16
"""Start of a staged chunk, unless the chunk is smaller: what vector instructions and NCCL ask for.

At thousands of ranks a chunk of a small parameter is an element or two. Padding would be most of
what travels, so such a chunk is aligned to the largest power of two that fits into it.
"""


def chunk_extent(size: int, world_size: int) -> int:
    """Rows of a padded chunk when ``size`` rows are cut as ``torch.chunk`` cuts them."""
    return -(-size // world_size)


def chunk_bounds(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """Half-open row range of ``rank``; empty for trailing ranks when rows run out."""
    extent = chunk_extent(size, world_size)
    return min(rank * extent, size), min((rank + 1) * extent, size)


def align(numel: int, itemsize: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """``numel`` rounded up so that the next element starts on an aligned byte."""
    unit = max(1, alignment_bytes // itemsize)
    return -(-numel // unit) * unit


def staged_alignment(chunk_bytes: int) -> int:
    """Bytes that the start of a staged chunk is a multiple of."""
    return min(STAGED_ALIGNMENT_BYTES, 1 << max(chunk_bytes.bit_length() - 1, 0))


def chunk_shape(shape: tuple[int, ...], dim: int | None, world_size: int) -> tuple[int, ...]:
    """Shape of a padded chunk: what the first rank holds."""
    if dim is None:
        return shape
    return (*shape[:dim], chunk_extent(shape[dim], world_size), *shape[dim + 1 :])


@dataclass(frozen=True)
class ParameterShape:
    """Input of the layout for one parameter.

    ``dim`` is the sharded tensor dim, or ``None`` for a parameter every rank holds whole.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = 0

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterLayout:
    """Position of one parameter in the buffers of its group. See [Note: layout].

    ``shard_offset`` is the first element of its chunk in the shard buffer, ``region_offset`` its
    first element in the unsharded buffer.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    world_size: int
    staged: bool
    shard_offset: int
    region_offset: int

    @cached_property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    @cached_property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a padded chunk: what the first rank holds."""
        return chunk_shape(self.shape, self.dim, self.world_size)

    @cached_property
    def chunk_numel(self) -> int:
        """Number of elements of a padded chunk."""
        return math.prod(self.chunk_shape)

    @cached_property
    def region_numel(self) -> int:
        """Elements in the unsharded buffer: ``W`` padded chunks, or the parameter alone."""
        return self.numel if self.staged else self.world_size * self.chunk_numel

    @property
    def is_even(self) -> bool:
        """Whether every rank holds a full chunk."""
        return self.dim is None or self.shape[self.dim] % self.world_size == 0

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the half-open range of ``rank`` along ``dim``."""
        if self.dim is None:
            raise ValueError(f"'{self.name}' is replicated: it has no bounds")
        return chunk_bounds(self.shape[self.dim], self.world_size, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part of ``rank``, without padding."""
        if self.dim is None:
            return self.shape
        start, stop = self.bounds(rank)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        """Return the number of elements of ``rank``, without padding."""
        return math.prod(self.local_shape(rank))


@dataclass(frozen=True)
class GroupLayout:
    """Positions of a group's parameters in its buffers, in the order of the group."""

    parameters: tuple[ParameterLayout, ...]
    world_size: int
    itemsize: int
    staged_offset: int
    shard_numel: int
    unsharded_numel: int
    reduced_stop: int
    """End of the packed chunks that a reduction scatters; gradients for owners follow."""
    owners: tuple[int | None, ...] = ()
    """For each parameter, the rank that gets its whole gradient; ``None``: scattered."""
    lands: bool = True
    """Whether owners get whole gradients; if not, all gradients are scattered."""

    @cached_property
    def with_owner(self) -> tuple[int, ...]:
        """Indices of parameters that have an owner."""
        return tuple(i for i, owner in enumerate(self.owners) if owner is not None)

    @cached_property
    def owned(self) -> tuple[int, ...]:
        """Indices of parameters whose gradients are reduced whole to an owner."""
        return self.with_owner if self.lands else ()

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """Indices of parameters whose gradients are packed too."""
        return tuple(i for i in self.staged if i not in self.owned)

    @cached_property
    def reduced_numel(self) -> int:
        """Number of elements of one rank's packed chunks in a reduction."""
        return self.reduced_stop - self.staged_offset

    @cached_property
    def direct(self) -> tuple[int, ...]:
        """Indices of parameters whose chunks are received directly in their regions."""
        return tuple(i for i, p in enumerate(self.parameters) if not p.staged)

    @cached_property
    def staged(self) -> tuple[int, ...]:
        """Indices of parameters that are packed into one transfer."""
        return tuple(i for i, p in enumerate(self.parameters) if p.staged)

    @property
    def staged_numel(self) -> int:
        """Number of elements of one rank's packed chunks."""
        return self.shard_numel - self.staged_offset


def plan_layout(
    shapes: Sequence[ParameterShape],
    world_size: int,
    itemsize: int,
    staging_bytes: int,
    owners: Sequence[int | None] = (),
    *,
    lands: bool = True,
) -> GroupLayout:
    """Lay out a group: direct parameters first, staged ones packed behind them.

    Args:
        shapes: the parameters, in the order their owner lists them.
        world_size: ranks that share the group.
        itemsize: bytes of an element.
        staging_bytes: chunks smaller than this many bytes are packed into one transfer.
        owners: for each parameter, the rank that gets its whole gradient, if any.
        lands: whether owners get whole gradients; if not, all are scattered.
    """
    parameters: dict[int, ParameterLayout] = {}
    shard_offset = region_offset = 0

    def place(index: int, staged: bool) -> None:
        nonlocal shard_offset, region_offset
        shape = shapes[index]
        chunk_numel = math.prod(chunk_shape(shape.shape, shape.dim, world_size))
        if staged:
            alignment = staged_alignment(chunk_numel * itemsize)
            shard_offset = align(shard_offset, itemsize, alignment)
        placed = ParameterLayout(
            shape.name, shape.shape, shape.dim, world_size, staged, shard_offset, region_offset
        )
        parameters[index] = placed
        shard_offset += chunk_numel if staged else align(chunk_numel, itemsize)
        region_offset += align(placed.region_numel, itemsize)

    staged = [i for i, s in enumerate(shapes) if _is_staged(s, world_size, itemsize, staging_bytes)]
    for index in sorted(set(range(len(shapes))) - set(staged)):
        place(index, staged=False)
    staged_offset = shard_offset
    owned = {i for i in staged if lands and owners and owners[i] is not None}
    for index in (i for i in staged if i not in owned):
        place(index, staged=True)
    shard_offset = align(shard_offset, itemsize, STAGED_ALIGNMENT_BYTES)
    reduced_stop = shard_offset
    for index in sorted(owned):
        place(index, staged=True)
    shard_offset = align(shard_offset, itemsize, STAGED_ALIGNMENT_BYTES)
    return GroupLayout(
        tuple(parameters[i] for i in range(len(shapes))),
        world_size,
        itemsize,
        staged_offset,
        shard_offset,
        region_offset,
        reduced_stop,
        tuple(owners) if any(owner is not None for owner in owners) else (),
        lands,
    )


def _is_staged(shape: ParameterShape, world_size: int, itemsize: int, staging_bytes: int) -> bool:
    if world_size == 1:  # chunk, region and parameter coincide
        return False
    if shape.dim != 0:
        return True
    rows = chunk_extent(shape.shape[0], world_size)
    return rows * math.prod(shape.shape[1:]) * itemsize < staging_bytes


def block_padded(numel: int, block_size: int | None) -> int:
    """``numel`` rounded up so that it can be cut into ``block_size`` equal slices."""
    return numel if block_size is None else -(-numel // block_size) * block_size
