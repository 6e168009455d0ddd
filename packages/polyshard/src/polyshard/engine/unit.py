"""Units, and what all units below one root share: reductions in flight, the end of backward.

Hooks call these (see :mod:`polyshard.engine.hooks`). One reduction is left in flight while the next
unit's backward computes; it is finished before another starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum, auto

import torch
from torch import Tensor, nn

from polyshard._torch.private import queue_backward_callback
from polyshard._torch.transforms import outside_transforms
from polyshard.agreement.failures import forget_failure
from polyshard.engine.prefetch import Prefetcher
from polyshard.exchange.flight import InFlight
from polyshard.exchange.freshness import Turn
from polyshard.group.group import ParameterGroup, State
from polyshard.group.kept import free_outdated
from polyshard.memory.pages import PagePool, pages_can_move
from polyshard.policies import MixedPrecisionPolicy
from polyshard.seams import Observer
from polyshard.sharding.mesh import MeshRoles


class Phase(Enum):
    """Where a unit is in the iteration."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    REHEARSAL = auto()
    """Shapes alone are wanted. See [Note: opaque units]."""


class Unit:
    """What one ``fully_shard`` call covers: modules that are gathered and freed together."""

    def __init__(
        self, modules: tuple[nn.Module, ...], roles: MeshRoles, policy: MixedPrecisionPolicy
    ) -> None:
        """Called after its modules' classes until a root names it."""
        self.modules = modules
        self.roles = roles
        self.policy = policy
        self.name = ", ".join(type(module).__name__ for module in modules)
        self.groups: list[ParameterGroup] = []
        self.context = RootContext()
        self.phase = Phase.IDLE
        self.is_root: bool | None = None
        self.reshard_after_forward: bool | int | None = None
        self.forward_prefetch: tuple[Unit, ...] = ()
        self.backward_prefetch: tuple[Unit, ...] = ()
        self.pending_modules: set[nn.Module] = set()

    # Gathering --------------------------------------------------------------------------------

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

    def keeps_unsharded(self) -> bool:
        """Whether parameters stay gathered between forward and backward.

        Unless told otherwise the root does: its backward follows at once. That reason is gone
        without grad mode, where staying gathered would only let parameters fall out of date.
        """
        if self.reshard_after_forward is None:
            return bool(self.is_root) and torch.is_grad_enabled()
        return not self.reshard_after_forward

    @property
    def reshards_in_training(self) -> bool:
        """Whether a training forward frees the parameters."""
        if self.reshard_after_forward is None:
            return not self.is_root
        return bool(self.reshard_after_forward)

    # Gradients --------------------------------------------------------------------------------

    @outside_transforms
    def post_backward(self) -> None:
        """Reduce and free, or accumulate. Harmless for a unit that took no part."""
        self.phase = Phase.POST_BACKWARD
        for group in reversed(self.groups):
            if not group.reduces:
                group.accumulate()
                if group.reshard_after_backward:
                    group.reshard()
                continue
            gradients = group.take_gradients()
            if group.reshard_after_backward:
                group.reshard()
            if gradients or group.expects_gradients():
                self.context.reduce(group, gradients)

    def end_step(self) -> None:
        """Free what was prefetched for nothing.

        A gather still under way would read shards that the optimizer is about to change.
        """
        for group in self.groups:
            if group.reshard_after_backward or group.state is State.GATHERING:
                group.reshard()
            group.drop_block()

    def reset(self) -> None:
        """Forget the iteration; end sharded."""
        self.phase = Phase.IDLE
        self.pending_modules.clear()
        for group in self.groups:
            group.discard()
            forget_failure(group.roles.ranks)


class RootContext:
    """What all units below one root share."""

    def __init__(self) -> None:
        """For one unit at first; a root hands its own to all units below."""
        self.units: list[Unit] = []
        self.pool = PagePool() if pages_can_move() else None
        self.forward_root: Unit | None = None
        self.turn = Turn()
        self.is_last_backward = True
        self.max_reductions = 1
        self.post_optim_event: torch.Event | None = None
        self.prefetcher: Prefetcher[Unit] = Prefetcher()
        self._reductions: deque[tuple[ParameterGroup, InFlight]] = deque()
        self._may_hold: dict[ParameterGroup, None] = {}

    def wait_for_optimizer(self) -> None:
        """Order the current stream behind the event the user recorded after the optimizer."""
        if self.post_optim_event is not None:
            torch.accelerator.current_stream().wait_event(self.post_optim_event)
            self.post_optim_event = None

    # Turns ------------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit) -> None:
        """``unit`` is called from outside of any other: a turn begins. See [Note: turns]."""
        self.forward_root = unit
        self.turn.begin()
        if self.pool is not None:
            self.pool.recall()

    @outside_transforms
    def refresh(self, unit: Unit) -> None:
        """Free what was kept from an earlier turn and is out of date; the rest as it is reached."""
        if self.turn.in_backward:
            return
        units = self.units if unit.is_root else (unit,)
        kept = [g for u in units for g in u.groups if g.state is State.UNSHARDED]
        if kept:
            free_outdated(kept)

    def end_forward(self) -> None:
        """The outermost forward has ended."""
        self.forward_root = None
        self.turn.in_forward = False
        if not self.turn.in_backward:
            self.prefetcher.forget_near()
            if not torch.is_grad_enabled():
                self._lend_pages()

    def _lend_pages(self) -> None:
        if self.pool is not None:
            self.pool.lend()

    # Reductions -------------------------------------------------------------------------------

    def reduce(self, group: ParameterGroup, gradients: dict[int, Tensor]) -> None:
        """Start to reduce, after earlier reductions have made room."""
        while len(self._reductions) >= self.max_reductions:
            self._finish_oldest()
        flight = group.start_reduction(gradients)
        flight.is_last = self.is_last_backward
        self._reductions.append((group, flight))

    def _finish_oldest(self) -> None:
        group, flight = self._reductions.popleft()
        group.finish_reduction(flight)
        if not flight.is_last:
            self._may_hold[group] = None

    def finish_reductions(self) -> None:
        """Put all sharded gradients in place."""
        while self._reductions:
            self._finish_oldest()

    # End of backward --------------------------------------------------------------------------

    def queue_end_of_backward(self) -> None:
        """Have :meth:`end_backward` called once when this backward has ended."""
        if not self.turn.in_backward:
            self.turn.in_backward = True
            queue_backward_callback(self.end_backward)

    @outside_transforms
    def end_backward(self) -> None:
        """Reduce what no post-backward reached, finish reductions, and leave all units idle."""
        self.turn.in_backward = False
        self.end_forward()
        for unit in self.units:
            unit.pending_modules.clear()
            if unit.phase is not Phase.POST_BACKWARD:
                unit.post_backward()
            unit.phase = Phase.IDLE
        if self.is_last_backward:
            self._end_iteration()

    def _end_iteration(self) -> None:
        """The last backward has ended: gradients are in place, and nothing of it is kept."""
        self.finish_reductions()
        for group in self._may_hold:
            group.place_held()
        self._may_hold.clear()
        self.prefetcher.order.end_step()
        for unit in self.units:
            unit.end_step()
        self._lend_pages()
        for observer in self._observers():
            observer.on_step_end()

    def _observers(self) -> Iterator[Observer]:
        """Every observer once, however many groups it watches."""
        found = {id(o): o for u in self.units for g in u.groups for o in g.meter.observers}
        yield from found.values()

    def reset(self) -> None:
        """Make the next iteration valid after an exception in forward or backward."""
        for _, flight in self._reductions:
            flight.end()
        self._reductions.clear()
        self._may_hold.clear()
        self.turn.in_backward = False
        self.prefetcher.reset()
        for unit in self.units:
            unit.reset()
        self.end_forward()
