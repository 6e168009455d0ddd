"""What all units below one root share: their order, reductions in flight, the end of backward.

[Note: order]
Units note the order of their forwards, with repetitions. A pre-backward takes its latest note and
prefetches the unit noted before it. One reduction is left in flight while the next unit's backward
computes; it is finished before another starts. In forward the order of the last time is replayed
(see :mod:`polyshard.engine.replay`).
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyshard._torch.private import queue_backward_callback
from polyshard.agreement.failures import FailureReport, forget_failure
from polyshard.engine.lookahead import Lookahead
from polyshard.engine.replay import Replay
from polyshard.exchange.freshness import Turn
from polyshard.group.kept import free_outdated
from polyshard.memory.pages import PagePool, pages_can_move

if TYPE_CHECKING:
    from polyshard.engine.unit import Unit
    from polyshard.exchange.flight import InFlight
    from polyshard.group.group import ParameterGroup
    from polyshard.seams import Observer


class Phase(Enum):
    """Where a unit is in the iteration."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class RootContext:
    """What all units below one root share."""

    def __init__(self) -> None:
        """Alone at first; :meth:`Unit.become_root` hands one context to all."""
        self.units: list[Unit] = []
        self.pool = PagePool() if pages_can_move() else None
        self.forward_root: Unit | None = None
        self.turn = Turn()
        self.is_last_backward = True
        self.max_reductions = 1
        self.post_optim_event: torch.Event | None = None
        self.replay = Replay()
        self.lookahead = Lookahead()
        self._order: list[Unit] = []
        self._reductions: deque[tuple[ParameterGroup, InFlight]] = deque()
        self._may_hold: dict[int, ParameterGroup] = {}

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

    def refresh(self, unit: Unit) -> None:
        """Free what was kept from an earlier turn and is out of date; the rest as it is reached."""
        if self.turn.in_backward:
            return
        units = self.units if unit.is_root else (unit,)
        kept = [g for u in units for g in u.groups if g.state.name == "UNSHARDED"]
        if kept:
            free_outdated(kept)

    def end_forward(self) -> None:
        """The outermost forward has ended."""
        self.forward_root = None
        self.turn.in_forward = False
        if not self.turn.in_backward:
            self.lookahead.forget()

    # Forward order ----------------------------------------------------------------------------

    def note_forward(self, unit: Unit) -> None:
        """Remember that ``unit`` ran forward, once per forward."""
        unit.order.append(len(self._order))
        self._order.append(unit)

    def unit_before(self, unit: Unit) -> Unit | None:
        """The unit whose forward came before the latest forward of ``unit``; takes the note."""
        if not unit.order:
            return None
        index = unit.order.pop()
        if index == 0 or index > len(self._order):
            return None
        return self._order[index - 1]

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
            self._may_hold[id(group)] = group

    def _place_held(self) -> None:
        """Place what is held of groups the last backward did not reach."""
        for group in self._may_hold.values():
            with FailureReport(group.roles.ranks, group.name), torch.no_grad():
                group.prepare().reducer.place_held()
            group.meter.reduced(group.name, 0.0)
        self._may_hold.clear()

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
            self.finish_reductions()
            self._place_held()
            self.lookahead.learn(self._order)
            self._order.clear()
            for unit in self.units:
                unit.end_step()
            for observer in self._observers():
                observer.on_step_end()

    def _observers(self) -> list[Observer]:
        """Every observer once, however many groups it watches."""
        found = {id(o): o for u in self.units for g in u.groups for o in g.meter.observers}
        return list(found.values())

    def reset(self) -> None:
        """Make the next iteration valid after an exception in forward or backward."""
        for _, flight in self._reductions:
            flight.end()
        self._reductions.clear()
        self._may_hold.clear()
        self._order.clear()
        self.turn.in_backward = False
        self.replay.reset()
        for unit in self.units:
            unit.reset()
            for group in unit.groups:
                forget_failure(group.roles.ranks)
        self.end_forward()
