"""How bytes move between ranks. One file per way; :func:`choose_transport` picks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from polyshard._torch.newer import backend_of
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import (
    Extents,
    GatherPiece,
    GatherRoute,
    Pending,
    ReduceRoute,
    Transport,
)
from polyshard.transport.collective import CollectiveTransport
from polyshard.transport.gloo import GlooTransport
from polyshard.transport.local import LocalTransport
from polyshard.transport.wrapped import WrappedTransport

__all__ = [
    "Extents",
    "GatherPiece",
    "GatherRoute",
    "MeshRoles",
    "Pending",
    "ReduceRoute",
    "Transport",
    "WrappedTransport",
    "backend_for",
    "choose_transport",
]


def choose_transport(roles: MeshRoles, device: torch.device) -> Transport:
    """The way that suits the shard axis: nothing, point-to-point on gloo, or collectives."""
    if roles.shard_size == 1:
        return LocalTransport()
    group = roles.shard_group
    if device.type == "cpu" and backend_for(group, device) == dist.Backend.GLOO:
        return GlooTransport(group)
    return CollectiveTransport(group, device)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """Backend of ``group`` for ``device``: a group may have one per device type."""
    return backend_of(group, device)
