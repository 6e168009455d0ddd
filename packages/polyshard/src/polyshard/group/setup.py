"""What a parameter group is made from, apart from its parameters and its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyshard.composition.stack import PluginStack
from polyshard.group.dtypes import Dtypes
from polyshard.policies import MixedPrecisionPolicy
from polyshard.seams import GroupIdentity, GroupInfo, ParamInfo
from polyshard.sharding.mesh import MeshRoles


@dataclass(frozen=True)
class GroupSetup:
    """What a group is made from, apart from its parameters and its name."""

    roles: MeshRoles
    policy: MixedPrecisionPolicy
    stack: PluginStack
    reshard_after_forward: bool
    block_size: int | None = None
    """Ranks that together keep the parameters between forward and backward, if not all free."""

    def info(
        self, name: str, parameters: Sequence[ParamInfo], dtypes: Dtypes, identity: GroupIdentity
    ) -> GroupInfo:
        """The group as plugins see it."""
        return GroupInfo(
            name=name,
            parameters=tuple(parameters),
            mesh=self.roles.mesh,
            rank=self.roles.shard_rank,
            world_size=self.roles.shard_size,
            device=self.roles.device,
            orig_dtype=dtypes.orig,
            param_dtype=dtypes.param,
            reduce_dtype=dtypes.reduce,
            identity=identity,
        )
