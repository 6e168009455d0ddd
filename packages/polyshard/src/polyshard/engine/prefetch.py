"""What is started before it is needed: gathers of units, and transfers from where shards rest.

[Note: prefetch]
When a unit has been gathered for its forward, the gather of the one that is expected next starts
and runs while the unit computes. What was gathered early stays until it is used or the outermost
forward has ended, so that a unit is gathered once in a forward whether or not it was foreseen. In
backward the unit that left its forward before is gathered while the one that starts computes.

A gather reads a shard on the device; a storage elsewhere needs time to bring it there. Storages
that ask are told from the second forward on: in forward, of the units behind the one that starts,
in backward of those before the one whose gather was just started. A wrong guess costs the transfer,
never a value: what nobody gathered is dropped when the forward or backward ends, since shards may
change then (see [Note: turns] of the freshness).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from polyshard._torch.untraced import outside_transforms
from polyshard.engine.order import StepOrder
from polyshard.group.group import ParameterGroup, State


class Gathered:
    """Groups that are gathered and freed together."""

    groups: list[ParameterGroup]

    @outside_transforms
    def unshard(self) -> None:
        """Begin to gather every group."""
        for group in self.groups:
            group.unshard()

    @outside_transforms
    def wait(self) -> None:
        """Finish gathering every group."""
        for group in self.groups:
            group.wait()

    @outside_transforms
    def reshard(self) -> None:
        """Free every group."""
        for group in self.groups:
            group.reshard()

    def is_sharded(self) -> bool:
        """Whether no group is gathered or on the way."""
        return all(group.state is State.SHARDED for group in self.groups)


G = TypeVar("G", bound=Gathered)


class Prefetcher(Generic[G]):
    """Starts early what the order of a step foresees. See [Note: prefetch]."""

    def __init__(self) -> None:
        self.order: StepOrder[G] = StepOrder()
        self._early: dict[G, None] = {}
        self._near: dict[ParameterGroup, None] = {}
        self._wanted = self.reach = 0
        """Units ahead that storages are told of: from the next forward on, and in this one."""

    def begin(self, caller: G) -> None:
        """``caller`` is called from outside of any other."""
        self.reach = self._wanted
        self.order.begin(caller)

    def enter(self, unit: G) -> G | None:
        """``unit`` is being gathered for its forward; returns the unit expected after it."""
        self._early.pop(unit, None)
        follower = self.order.enter(unit)
        if self.reach:
            self._bring_near(self.order.following(self.reach))
        return follower

    def gather_early(self, follower: G) -> None:
        """Start to gather what is expected next, unless it is gathered."""
        if follower.is_sharded():
            follower.unshard()
            self._early[follower] = None

    def end(self) -> None:
        """The outermost forward has ended: free what was gathered early and never ran."""
        if self.order.end():
            self._wanted = max(map(_units_wanted, self.order.recorded()), default=0)
        self._free_early()

    def tell_before(self, unit: G) -> None:
        """``unit`` is being gathered for the backward that comes next."""
        self._bring_near(self.order.preceding(unit, self.reach))

    def forget_near(self) -> None:
        """A turn has ended: what was brought near and not gathered may be out of date soon."""
        for group in self._near:
            group.shards.forget_prefetched()
        self._near.clear()

    def reset(self) -> None:
        """Forget the iteration under way; whoever calls this frees all units."""
        self._early.clear()
        self.order.reset()

    def _free_early(self) -> None:
        for unit in self._early:
            unit.reshard()
        self._early.clear()

    def _bring_near(self, units: Iterable[G]) -> None:
        for unit in units:
            for group in unit.groups:
                if group.is_sharded and _is_read(group):
                    group.shards.prefetch()
                    self._near[group] = None


def _is_read(group: ParameterGroup) -> bool:
    """Whether a gather now would read the shard."""
    generation = group.prepare()
    if generation.block is not None and generation.block.holds:
        return False
    return not generation.gather.resends()


def _units_wanted(unit: Gathered) -> int:
    """How many units ahead the storages of ``unit`` want to know."""
    storages = (group.shards.storage for group in unit.groups)
    return max((s.prefetch_units for s in storages), default=0)
