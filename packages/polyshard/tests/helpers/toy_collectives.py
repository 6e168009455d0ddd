"""A plugin whose groups use torch's collectives, where they would send point to point."""

from __future__ import annotations

import polyshard
from polyshard.plugins.builtin import DefaultBackend
from polyshard.plugins.seams import GroupInfo
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import Transport
from polyshard.transport.collective import CollectiveTransport


class Collectives(DefaultBackend):
    """Standard collectives, also where point-to-point transfers would do."""

    name = "collectives"

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        return CollectiveTransport(roles.shard_group, group.device)


class ByCollectives(polyshard.Plugin):
    name = "by_collectives"

    @polyshard.hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> Collectives:
        return Collectives()
