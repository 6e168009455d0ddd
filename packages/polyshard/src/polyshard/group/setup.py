"""What a parameter group is made from, apart from its parameters and its name."""

from __future__ import annotations

from dataclasses import dataclass

from polyshard.composition.stack import PluginStack
from polyshard.policies import MixedPrecisionPolicy
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
