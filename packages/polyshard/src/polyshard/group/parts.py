"""What the runtime of a group is built from."""

from __future__ import annotations

from dataclasses import dataclass

from polyshard.composition.roles import Contributions
from polyshard.composition.transforms import Onion
from polyshard.exchange.accumulation import Accumulation
from polyshard.exchange.freshness import Turn
from polyshard.exchange.watch import Watch
from polyshard.group.dtypes import Dtypes, GradientDtypes
from polyshard.memory.pages import PagePool
from polyshard.memory.streams import Lanes
from polyshard.params.sharded import Shards
from polyshard.policies import MixedPrecisionPolicy
from polyshard.seams import GroupInfo
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Transport


@dataclass(frozen=True)
class Parts:
    """What a runtime is built from, all settled by the plan."""

    info: GroupInfo
    shards: Shards
    roles: MeshRoles
    policy: MixedPrecisionPolicy
    contributions: Contributions
    transport: Transport
    onion: Onion
    pool: PagePool | None
    block_size: int | None
    waiting: Accumulation
    """Gradients of backwards before this runtime was made."""
    turn: Turn
    dtypes: Dtypes
    gradients: GradientDtypes
    keeps_memory: bool
    """Whether unsharded memory, once there, stays at its addresses."""
    lanes: Lanes
    watch: Watch | None = None
    """Who asks for more than what is counted, if anybody does."""
