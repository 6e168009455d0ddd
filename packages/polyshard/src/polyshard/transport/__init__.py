"""How bytes move between ranks. One file per way; :func:`choose_transport` picks."""

from __future__ import annotations

import torch
import torch.distributed as dist

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
)
from polyshard.transport.collective import CollectiveTransport
from polyshard.transport.collective_owners import CollectiveOwner
from polyshard.transport.gloo import GlooTransport
from polyshard.transport.gloo_owners import GlooOwner
from polyshard.transport.local import LocalTransport
from polyshard.transport.wire import wire_of
from polyshard.transport.wrapped import WrappedTransport

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
    planned = stands_for(backend_for(group, device))
    if planned == dist.Backend.GLOO:
        return GlooTransport(group)
    if device.type == "cpu" and backend_for(group, device) == dist.Backend.GLOO:
        return GlooTransport(group)
    return CollectiveTransport(group, device)


def owner_route_over(
    group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, tag: int
) -> OwnerRoute:
    """A way for whole tensors among the ranks of ``group``, such as replicas."""
    if device.type == "cpu" and backend_for(group, device) == dist.Backend.GLOO:
        return GlooOwner(wire_of(group), group.rank(), group.size(), tag)
    return CollectiveOwner(group, dtype)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """Backend of ``group`` for ``device``: a group may have one per device type."""
    return backend_of(group, device)
