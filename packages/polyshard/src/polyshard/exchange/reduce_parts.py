"""What the reductions of a group work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from polyshard.exchange.accumulation import Accumulation
from polyshard.exchange.gather import Line
from polyshard.exchange.landing import Landing
from polyshard.exchange.placing import Placing
from polyshard.exchange.watch import Watch
from polyshard.memory.pages import PagePool
from polyshard.memory.streams import Lanes
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import Turns


@dataclass(frozen=True)
class ReduceParts:
    """What a group's reductions work with; all of it outlives the reducer."""

    roles: MeshRoles
    line: Line
    waiting: Accumulation
    """Gradients of backwards before, and of those that are not the last."""
    check_placed: Callable[[Tensor, object], None]
    """Looks at what the storage makes of the first gradient."""
    placing: Placing
    lanes: Lanes
    turns: Turns
    landing: Landing | None = None
    """Of gradients that land whole on an owner, if any do."""
    pool: PagePool | None = None
    watch: Watch | None = None
    """Who asks for more than what is counted, if anybody does."""
