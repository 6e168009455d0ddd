"""Where one parameter is sharded: what ``shard_placement_fn`` may answer, and what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from polyshard.errors import MeshError, SettingError, ShardDimError, warn
from polyshard.sharding.layout import chunk_bounds
from polyshard.sharding.mesh import MeshRoles, resolve_mesh

PlacementFunction = Callable[[nn.Parameter], Any]


@dataclass(frozen=True)
class ShardPlacement:
    """An answer of ``shard_placement_fn`` that chooses the mesh as well.

    Attributes:
        placement: the dim to shard, ``Replicate()`` to keep the parameter whole on every rank,
            ``None`` for dim 0.
        mesh: data-parallel mesh of this parameter, 1-D or 2-D; ``None`` for that of the unit.
            Gradients are averaged over this mesh.
    """

    placement: Shard | Replicate | None = None
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class Placed:
    """The dim of a parameter to shard (``None``: none), and the mesh with its roles."""

    dim: int | None
    roles: MeshRoles


def shard_shape(shape: torch.Size, placed: Placed, rank: int) -> tuple[int, ...]:
    """Local shape of rank ``rank`` of the shard axis, for a tensor of ``shape``."""
    found = list(shape)
    if placed.dim is not None:
        start, stop = chunk_bounds(shape[placed.dim], placed.roles.shard_size, rank)
        found[placed.dim] = stop - start
    return tuple(found)


def resolve_placement(answer: object, fqn: str, value: Tensor, roles: MeshRoles) -> Placed:
    """What ``shard_placement_fn`` meant for the parameter ``fqn``.

    Args:
        answer: ``None``, ``Shard``, ``Replicate``, :class:`ShardPlacement`, or torch's
            ``ShardPlacementResult``.
        fqn: of the parameter, for errors.
        value: what is sharded.
        roles: of the unit.

    Raises:
        SettingError: for other answers, and dims the parameter does not have.
    """
    placement, roles = _unpacked(answer, fqn, roles)
    if isinstance(placement, Replicate):
        return Placed(None, roles.whole())
    if value.ndim == 0:
        if placement is not None:
            warn(
                [
                    f"shard_placement_fn returned {placement} for '{fqn}', which has no effect: it "
                    "has no dims and stays whole on every rank"
                ]
            )
        return _placed(None, roles)
    if placement is None:
        return _placed(0, roles)
    dim = placement.dim + value.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < value.ndim:
        raise ShardDimError(
            f"shard_placement_fn returned {placement!r} for '{fqn}', which has {value.ndim} dims "
            f"{tuple(value.shape)}."
        )
    return _placed(dim, roles)


def _placed(dim: int | None, roles: MeshRoles) -> Placed:
    """At ``dim``, which is checked on every mesh, also on one without an axis to shard over."""
    return Placed(None, roles.whole()) if roles.shard_axis is None else Placed(dim, roles)


def _unpacked(
    answer: object, fqn: str, roles: MeshRoles
) -> tuple[Shard | Replicate | None, MeshRoles]:
    placement: Any = answer
    if hasattr(answer, "placement") and not isinstance(answer, Shard | Replicate):
        placement = answer.placement
        mesh = answer.mesh if isinstance(answer, ShardPlacement) else _mesh_of(answer)
        try:
            roles = roles if mesh is None else resolve_mesh(mesh)
        except MeshError as error:
            raise MeshError(f"shard_placement_fn, for '{fqn}': {error}") from error
    # Exactly these: a subclass such as torch's strided shard means something else.
    if placement is not None and type(placement) not in (Shard, Replicate):
        raise SettingError(
            f"shard_placement_fn returned {answer!r} for '{fqn}'. It may return None, Shard(dim), "
            "Replicate() or ShardPlacement(placement, mesh)."
        )
    return placement, roles


def _mesh_of(answer: object) -> Any:
    """Mesh of torch's ``ShardPlacementResult``, whose ``mesh_info`` wraps one."""
    info = getattr(answer, "mesh_info", None)
    return getattr(info, "mesh", info)
