"""A parameter whose gradient lands whole on one rank, and what moves it over the axes of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from polyshard._torch.private import dtensor_spec, local_tensor, wrap_local
from polyshard._torch.whole_rows import WholeRows
from polyshard.errors import LifecycleError
from polyshard.params.parameter import ShardedParameter
from polyshard.plugins.seams import OwnedParameter, ParamInfo
from polyshard.program.unshard import ShardAxis
from polyshard.sharding.layout import ParameterLayout
from polyshard.transport import owner_route_over
from polyshard.transport.base import DONE, OwnerRoute, Pending


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh that gradients cross on their way to owners."""

    route: OwnerRoute
    number: int
    """Of the axis, in the mesh."""
    here: int
    """This rank's position."""


@dataclass(frozen=True)
class Axes:
    """The shard axis first, then those of replicas."""

    sizes: tuple[int, ...]
    """Of all axes of the mesh."""
    shard: Axis
    replicas: tuple[Axis, ...]
    here: tuple[int, ...]
    """This rank's position on every axis of the mesh."""

    @classmethod
    def of(cls, line: ShardAxis, dtype: torch.dtype) -> Axes:
        """Routes over the mesh of ``line``, with sums in ``dtype``."""
        roles, mesh = line.roles, line.roles.mesh
        here = tuple(mesh.get_local_rank(a) for a in range(mesh.ndim))
        number = -1 if roles.shard_axis is None else roles.shard_axis
        shard = Axis(line.transport.owner_route(dtype, line.tag), number, roles.shard_rank)
        replicas = tuple(
            Axis(owner_route_over(mesh.get_group(a), roles.device, dtype, line.tag), a, here[a])
            for a in roles.replicate_axes
            if mesh.size(a) > 1
        )
        return cls(tuple(mesh.size(a) for a in range(mesh.ndim)), shard, replicas, here)

    def position(self, owner: int) -> tuple[int, ...]:
        """Of ``owner``, on every axis of the mesh."""
        found: list[int] = []
        for size in reversed(self.sizes):
            owner, at = divmod(owner, size)
            found.append(at)
        return tuple(reversed(found))


class Owned(OwnedParameter):
    """The engine's :class:`~polyshard.plugins.seams.OwnedParameter`."""

    def __init__(
        self, index: int, owner: int, sharded: ShardedParameter, placed: ParameterLayout, axes: Axes
    ) -> None:
        """Parameter ``index`` of its group."""
        self.index = index
        self._owner = owner
        self._at = axes.position(owner)
        self._axes = axes
        self._sharded = sharded
        self._placed = placed
        self._rank = axes.shard.here
        self._specs: dict[torch.dtype, Any] = {}

    @property
    @override
    def info(self) -> ParamInfo:
        return self._sharded.current_info

    @property
    @override
    def parameter(self) -> nn.Parameter:
        return self._sharded.parameter

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self._placed.shape

    @property
    @override
    def owner(self) -> int:
        return self._owner

    @property
    @override
    def is_owner(self) -> bool:
        return self._at == self._axes.here

    @property
    def numel(self) -> int:
        """Elements of the whole gradient."""
        return self._placed.numel

    @property
    def arriving_numel(self) -> int:
        """Elements that peers of the shard axis send to the rank that sums them."""
        return (self._placed.world_size - 1) * self.numel

    # Gradients --------------------------------------------------------------------------------

    def sums_shards(self) -> bool:
        """Whether this rank makes the sum over the shard axis."""
        return self._is_at(self._axes.shard)

    def reduce(self, source: Tensor, out: Tensor | None) -> Pending:
        """Sum over the shard axis."""
        axis = self._axes.shard
        return axis.route.reduce(self.index, self._on(axis), source, out)

    def over_replicas(self, total: Tensor | None) -> Tensor | None:
        """The sum of ``total`` over replicas, on the owner."""
        for axis in self._axes.replicas:
            if total is None:
                return None
            out = torch.empty_like(total) if self._is_at(axis) else None
            axis.route.reduce(self.index, self._on(axis), total, out).wait()
            total = out
        return total

    def put(self, whole: Tensor | None, dtype: torch.dtype) -> None:
        """Set or add to ``.grad``; ``whole`` is flat, and ``None`` on all ranks but the owner.

        Raises:
            LifecycleError: on every rank, where it holds rows.
        """
        parameter = self.parameter
        if parameter.grad is None:
            parameter.grad = self._wrapped(whole, dtype)
        elif not self.has_landed():
            raise LifecycleError(
                f"'{self.info.fqn}' has a gradient of rows in .grad, and the one of this backward "
                "lands whole on an owner: the two cannot be added. Set .grad to None before."
            )
        elif whole is not None:
            local = self._landed()
            local.whole.add_(whole.view(self.shape))
            local.writes += 1

    def _wrapped(self, whole: Tensor | None, dtype: torch.dtype) -> DTensor:
        shape, dim = self.shape, self._placed.dim or 0
        if whole is None:
            empty = (*shape[:dim], 0, *shape[dim + 1 :]) if shape else (0,)
            local = torch.empty(empty, dtype=dtype, device=self.parameter.device)
        else:
            local = whole.view(shape)
        return wrap_local(WholeRows(local), self._spec(local.dtype))

    def _spec(self, dtype: torch.dtype) -> Any:
        """That of the parameter, but that ranks of all axes hold different rows."""
        spec = self._specs.get(dtype)
        if spec is None:
            form = self._sharded.spec
            assert form.tensor_meta is not None
            placements = list(form.placements)
            for axis in self._axes.replicas:
                placements[axis.number] = Shard(self._placed.dim or 0)
            shape = form.tensor_meta.shape
            spec = dtensor_spec(form.mesh, tuple(placements), shape, dtype)
            self._specs[dtype] = spec
        return spec

    @override
    def has_landed(self) -> bool:
        gradient = self.parameter.grad
        if gradient is None:
            raise LifecycleError(f"'{self.info.fqn}' has no gradient.")
        return isinstance(gradient, DTensor) and isinstance(local_tensor(gradient), WholeRows)

    @override
    def gradient(self) -> Tensor | None:
        return self._landed().whole if self.is_owner else None

    @property
    @override
    def writes(self) -> int:
        return self._landed().writes

    def _landed(self) -> WholeRows:
        local = local_tensor(cast("DTensor", self.parameter.grad))
        assert isinstance(local, WholeRows)
        return local

    # Rows -------------------------------------------------------------------------------------

    @override
    def scatter(
        self, whole: Tensor | None, dtype: torch.dtype, *, key: int = 0
    ) -> Callable[[], Tensor]:
        shape = self._placed.local_shape(self._rank)
        out = torch.empty(math.prod(shape), dtype=dtype, device=self.parameter.device)
        pending = DONE  # where rows come from another replica
        if self._is_beside_owner(0):
            axis = self._axes.shard
            parts = None if whole is None else self._parts(whole.to(dtype).view(self.shape))
            most = self._placed.chunk_numel
            pending = axis.route.scatter(self._key(key), self._on(axis), parts, out, most)

        def rows() -> Tensor:
            pending.wait()
            for place, axis in enumerate(self._axes.replicas):
                if self._is_beside_owner(place + 1):
                    axis.route.broadcast(self._key(key), self._on(axis), out).wait()
            return out.view(shape)

        return rows

    @override
    def gather(self, rows: Tensor) -> Tensor | None:
        if not self._is_beside_owner(0):
            return None
        axis = self._axes.shard
        whole = rows.new_empty(self.shape) if self.is_owner else None
        parts = None
        if whole is not None:
            views = self._views(whole)
            parts = [v.view(-1) if v.is_contiguous() else v.new_empty(v.numel()) for v in views]
        most, source = self._placed.chunk_numel, rows.contiguous().view(-1)
        axis.route.gather(self.index, self._on(axis), source, parts, most).wait()
        for view, part in zip(views if whole is not None else (), parts or (), strict=True):
            if not view.is_contiguous():
                view.copy_(part.view(view.shape))
        return whole

    def _views(self, whole: Tensor) -> list[Tensor]:
        placed = self._placed
        if placed.dim is None:
            return [whole]
        bounds = [placed.bounds(rank) for rank in range(placed.world_size)]
        return [whole.narrow(placed.dim, start, stop - start) for start, stop in bounds]

    def _parts(self, whole: Tensor) -> Sequence[Tensor]:
        return [view.contiguous().view(-1) for view in self._views(whole)]

    def _key(self, key: int) -> int:
        return self.index + (key << 20)

    # Positions --------------------------------------------------------------------------------

    def _on(self, axis: Axis) -> int:
        return self._at[axis.number] if axis.number >= 0 else 0

    def _is_at(self, axis: Axis) -> bool:
        return self._on(axis) == axis.here

    def _is_beside_owner(self, place: int) -> bool:
        """Whether this rank is where the owner is on all replicate axes from ``place`` on."""
        return all(map(self._is_at, self._axes.replicas[place:]))
