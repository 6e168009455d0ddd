"""Parts of a parameter on the axes of its mesh beyond those of data parallelism.

[Note: leads]
Tensor parallelism divides a parameter before shards are cut. What lands on an owner is the part of
its place on those axes, so a matrix lies in parts on all places beside its owner. They are put
together on one of these places, the *lead*, and parts of what it makes of them return. Axes are
undone from the last to the first, and followed from the first to the last, as ``DTensor`` reads
placements. Where an axis repeats the parameter, the lead has all of it and what returns is copied.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from polyshard.sharding.layout import chunk_bounds, chunk_extent
from polyshard.transport import owner_route_over
from polyshard.transport.base import OwnerRoute, Pending
from polyshard_optimizers.matrix.errors import MatrixError


@dataclass(frozen=True)
class Axis:
    """One axis that divides (``dim``) or repeats (``None``) what axes before it have left."""

    name: str
    size: int
    here: int
    dim: int | None
    route: OwnerRoute

    def bounds(self, rows: int) -> list[tuple[int, int]]:
        """Of each rank's part of so many rows."""
        return [chunk_bounds(rows, self.size, rank) for rank in range(self.size)]

    def part(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Shape of the part of ``rank``."""
        if self.dim is None:
            return shape
        start, stop = chunk_bounds(shape[self.dim], self.size, rank)
        return (*shape[: self.dim], stop - start, *shape[self.dim + 1 :])

    def views(self, whole: Tensor) -> list[Tensor]:
        """Each rank's part of ``whole``."""
        if self.dim is None:
            return [whole] * self.size
        bounds = self.bounds(whole.shape[self.dim])
        return [whole.narrow(self.dim, start, stop - start) for start, stop in bounds]


class Parts:
    """How one parameter lies on such axes. See [Note: leads]."""

    def __init__(self, parameter: DTensor, first: int, name: str) -> None:
        """``first`` is the first of these axes in the mesh of the parameter.

        Raises:
            MatrixError: for placements that neither divide nor repeat.
        """
        tag = zlib.crc32(f"matrix {name}".encode()) >> 2
        mesh, axes = parameter.device_mesh, []
        for number in range(first, mesh.ndim):
            placement = parameter.placements[number]
            if mesh.size(number) == 1:
                continue
            if type(placement) not in (Shard, Replicate):
                raise MatrixError(
                    f"'{name}' is {placement} on axis {number} of {mesh}; a matrix is put together "
                    "of parts that are Shard or Replicate there. Leave it out with matrices=."
                )
            dim = placement.dim if isinstance(placement, Shard) else None
            group, at = mesh.get_group(number), mesh.get_local_rank(number)
            route = owner_route_over(group, parameter.device, parameter.dtype, tag)
            label = (mesh.mesh_dim_names or {number: str(number)})[number]
            axes.append(Axis(label, mesh.size(number), at, dim, route))
        self.axes = tuple(axes)
        self.shapes = [tuple(parameter.shape)]
        """Before each axis, and after the last."""
        for axis in axes:
            self.shapes.append(axis.part(self.shapes[-1], axis.here))

    @property
    def are_divided(self) -> bool:
        """Whether any axis divides."""
        return any(axis.dim is not None for axis in self.axes)

    def leads(self, number: int) -> tuple[int, ...]:
        """Place ``number`` of all of these axes."""
        found: list[int] = []
        for axis in reversed(self.axes):
            number, at = divmod(number, axis.size)
            found.append(at)
        return tuple(reversed(found))

    def offset(self) -> int:
        """First row of this rank's part, where dim 0 alone is divided."""
        start = 0
        for axis, shape in zip(self.axes, self.shapes, strict=False):
            if axis.dim is not None:
                start += axis.bounds(shape[0])[axis.here][0]
        return start

    def keep_together(self, rows: int) -> bool:
        """Whether every rank's part is so many rows, or a multiple of that; the same on all."""
        sizes = {self.shapes[0][0]}
        for axis in self.axes:
            if axis.dim != 0 or any(chunk_extent(size, axis.size) % rows for size in sizes):
                return False
            sizes = {stop - start for size in sizes for start, stop in axis.bounds(size)}
        return True

    # Moving -----------------------------------------------------------------------------------

    def gather(self, part: Tensor, leads: Sequence[int]) -> Tensor | None:
        """The whole of every rank's ``part``: on the lead, ``None`` elsewhere."""
        value: Tensor | None = part
        for place in reversed(range(len(self.axes))):
            if value is not None:
                value = self._gathered(place, value, leads[place])
        return value

    def _gathered(self, place: int, part: Tensor, lead: int) -> Tensor | None:
        axis, shape = self.axes[place], self.shapes[place]
        mine = axis.here == lead
        if axis.dim is None:
            return part if mine else None
        whole = part.new_empty(shape) if mine else None
        views = [] if whole is None else axis.views(whole)
        parts = [v.view(-1) if v.is_contiguous() else v.new_empty(v.numel()) for v in views]
        source = part.contiguous().view(-1)
        given = parts if mine else None
        axis.route.gather(place, lead, source, given, self._most(place)).wait()
        for view, found in zip(views, parts, strict=True):
            if not view.is_contiguous():
                view.copy_(found.view(view.shape))
        return whole

    def scatter(
        self, whole: Tensor | None, leads: Sequence[int], empty: Tensor
    ) -> tuple[Tensor, list[Pending]]:
        """This rank's part of the ``whole`` that the lead has, and what is on its way still.

        ``empty`` says of which dtype and device.
        """
        leaving: list[Pending] = []
        value = whole
        for place, axis in enumerate(self.axes):
            inner = zip(self.axes[place + 1 :], leads[place + 1 :], strict=True)
            if not all(other.here == lead for other, lead in inner):
                continue  # another axis brings it here
            lead = leads[place]
            out = empty.new_empty(self.shapes[place + 1])
            parts = None if value is None else [v.contiguous().view(-1) for v in axis.views(value)]
            flat = out.view(-1)
            pending = axis.route.scatter(place, lead, parts, flat, self._most(place))
            if parts is None:
                pending.wait()
                value = out
            else:  # which need not be in `out` before the wait
                leaving.append(pending)
                value = parts[axis.here].view(out.shape)
        assert value is not None
        return value, leaving

    def _most(self, place: int) -> int:
        axis, shape = self.axes[place], list(self.shapes[place])
        if axis.dim is not None:
            shape[axis.dim] = chunk_extent(shape[axis.dim], axis.size)
        return math.prod(shape)
