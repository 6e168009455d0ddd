"""How bytes move between ranks. One file per way; :func:`choose_transport` picks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from polyshard._torch.newer import backend_of
from polyshard._torch.planned import stands_for
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import (
    Extents,
    GatherPiece,
    GatherRoute,
    OwnerRoute,
    Pending,
    ReduceRoute,
    Transport,
    Turn,
)
from polyshard.transport.collective import CollectiveTransport
from polyshard.transport.collective_owners import CollectiveOwner
from polyshard.transport.local import LocalTransport
from polyshard.transport.wrapped import WrappedTransport

if TYPE_CHECKING:
    from polyshard.transport.gloo.presence import Presence

__all__ = [
    "Extents",
    "GatherPiece",
    "GatherRoute",
    "MeshRoles",
    "OwnerRoute",
    "Pending",
    "ReduceRoute",
    "Transport",
    "WrappedTransport",
    "backend_for",
    "choose_transport",
    "owner_route_over",
]


def choose_transport(roles: MeshRoles, device: torch.device) -> Transport:
    """The way that suits the shard axis: nothing, point-to-point on gloo, or collectives.

    Ranks that are only planned for get what real ones would.
    """
    if roles.shard_size == 1:
        return LocalTransport()
    group = roles.shard_group
    backend = backend_for(group, device)
    is_gloo = device.type == "cpu" and backend == dist.Backend.GLOO
    if is_gloo or stands_for(backend) == dist.Backend.GLOO:
        from polyshard.transport.gloo import GlooTransport

        return GlooTransport(group)
    return CollectiveTransport(group, device)


def owner_route_over(
    group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, tag: int
) -> OwnerRoute:
    """A way for whole tensors among the ranks of ``group``, such as replicas."""
    if device.type == "cpu" and backend_for(group, device) == dist.Backend.GLOO:
        from polyshard.transport.gloo.owners import GlooOwner
        from polyshard.transport.gloo.wire import wire_of

        return GlooOwner(wire_of(group), group.rank(), group.size(), tag)
    return CollectiveOwner(group, dtype)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """Backend of ``group`` for ``device``: a group may have one per device type."""
    return backend_of(group, device)


def presence_of(roles: MeshRoles, tag: int, count: int, turns: Turn) -> Presence | None:
    """What compares the presence of gradients between ranks.

    ``None`` where there is one rank, and where comparing is not cheap: see [Note: presence].
    """
    device = roles.device
    if device.type != "cpu" or len(roles.ranks) == 1:
        return None
    whole = roles.mesh.get_group(0) if roles.mesh.ndim == 1 else dist.group.WORLD
    if whole is None or backend_for(whole, device) != dist.Backend.GLOO:
        return None
    from polyshard.transport.gloo.presence import Presence

    return Presence(roles, whole, tag, count, turns)


def all_reduce(
    values: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce ``values`` in place, on all ranks of ``group``; they are ready for the stream.

    Raises:
        ConnectionLostError: when another failure ended it.
    """
    if _has_wire(values, group):
        from polyshard.transport.gloo.messages import all_reduce_over
        from polyshard.transport.gloo.wire import wire_of

        all_reduce_over(wire_of(group), values, op)
    else:
        dist.all_reduce(values, op, group=group)


def all_gather(rows: Tensor, row: Tensor, group: dist.ProcessGroup) -> None:
    """Row ``r`` of ``rows`` (``[W, n]``) becomes the ``row`` (``[n]``) of rank ``r``.

    Raises:
        ConnectionLostError: when another failure ended it.
    """
    if _has_wire(row, group):
        from polyshard.transport.gloo.messages import all_gather_over
        from polyshard.transport.gloo.wire import wire_of

        all_gather_over(wire_of(group), rows, row)
    else:
        dist.all_gather(list(rows.unbind()), row, group=group)


def _has_wire(values: Tensor, group: dist.ProcessGroup) -> bool:
    return values.device.type == "cpu" and backend_of(group, values.device) == dist.Backend.GLOO
