"""Units, and what all units below one root share: reductions, the end of backward.

Hooks call these (see :mod:`polyshard.engine.hooks`).
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from itertools import chain
from types import FrameType

import torch
from torch import nn

from polyshard._torch.newer import resets_sharded_gradients
from polyshard._torch.private import outside_transforms, queue_backward_callback
from polyshard.engine.initial_values import InitialValues
from polyshard.engine.optimizers import watch_steps
from polyshard.engine.step import (
    BackwardGuard,
    Finalization,
    Gathered,
    Prefetcher,
    Reduction,
    Reductions,
)
from polyshard.errors import LifecycleError
from polyshard.failures import Ended, Kind, Part, failure_handler, kept_failure_handler
from polyshard.group.group import ParameterGroup, State, free_outdated
from polyshard.memory.pages import PagePool, pages_can_move
from polyshard.memory.streams import Lanes, streams_of
from polyshard.plugins.seams import Observer
from polyshard.policies import MixedPrecisionPolicy
from polyshard.program.meter import tell
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import Turn


class UnitWatch:
    """Pairs the begins and ends of one unit's computation for the observers that watch it."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        """Nothing computes."""
        self._observers = observers
        self._forwards = 0
        self._in_backward = False

    @classmethod
    def of(cls, groups: Iterable[ParameterGroup]) -> UnitWatch | None:
        """For the observers of any of ``groups``, each once; ``None`` if there are none."""
        found = {id(o): o for group in groups for o in group.meter.step_observers}
        return cls(tuple(found.values())) if found else None

    def begin_forward(self, unit: str) -> None:
        """A module runs."""
        self._forwards += 1
        tell(self._observers, "on_forward", unit)

    def end_forward(self, unit: str) -> None:
        """It has ended; nothing to tell where that was told already."""
        if self._forwards:
            self._forwards -= 1
            tell(self._observers, "on_forward_end", unit)

    def begin_backward(self, unit: str) -> None:
        """Its backward computes."""
        self._in_backward = True
        tell(self._observers, "on_backward", unit)

    def end_backward(self, unit: str) -> None:
        """It has ended, if it was on."""
        if self._in_backward:
            self._in_backward = False
            tell(self._observers, "on_backward_end", unit)


def end_backward(watch: UnitWatch | None, unit: str) -> None:
    """Tell observers that ``unit`` has computed its backward."""
    if watch is not None:
        watch.end_backward(unit)


class Phase(Enum):
    """Where a unit is in the iteration."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    REHEARSAL = auto()
    """Shapes alone are wanted. See [Note: opaque units]."""


class Unit(Gathered):
    """What one ``fully_shard`` call covers: modules that are gathered and freed together."""

    def __init__(
        self, modules: tuple[nn.Module, ...], roles: MeshRoles, policy: MixedPrecisionPolicy
    ) -> None:
        """Called after its modules' classes until a root names it."""
        self.modules = modules
        self.roles = roles
        self.policy = policy
        self.name = ", ".join(type(module).__name__ for module in modules)
        self.groups = []
        self.borrowed: list[ParameterGroup] = []
        """Groups of units beside it that its modules use. See [Note: shared parameters]."""
        self.initial_values: tuple[InitialValues, ...] = ()  # until ranks have compared them
        self.watch: UnitWatch | None = None
        self.context = RootContext()
        self.phase = Phase.IDLE
        self.is_root: bool | None = None
        self.reshard_after_forward: bool | int | None = None
        self.forward_prefetch: tuple[Unit, ...] = ()
        self.backward_prefetch: tuple[Unit, ...] = ()
        self.pending_modules: set[nn.Module] = set()
        self.calls = Counter[nn.Module]()
        """Calls of each module that are under way."""
        self.first_node = 0
        """Number in autograd of the first node of the last forward."""

    def ended(self) -> Iterator[Ended]:
        """For ranks to compare at the end of a step: experts may be on a mesh of their own."""
        yield Ended(self.roles.mesh, ())
        for group in self.groups:
            yield Ended(group.roles.mesh, tuple(group.lacking()))

    # Gathering --------------------------------------------------------------------------------

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

    def may_be_skipped(self) -> bool:
        """Whether a rank may leave out its forward, and take part by ``unshard()`` and zeros."""
        return any(group.reduce_settings.reduce_unused for group in self.groups)

    # Gradients --------------------------------------------------------------------------------

    @outside_transforms
    def post_backward(self) -> None:
        """Reduce and free, or accumulate. Harmless for a unit that took no part."""
        if self.watch is not None:
            self.watch.end_backward(self.name)
        self.phase = Phase.POST_BACKWARD
        for group in reversed(self.groups):
            self.context.post_backward(group)

    def end_unreached(self) -> None:
        """A backward has ended without this unit's post-backward."""
        end_backward(self.watch, self.name)
        finalization = self.context.finalization
        for group in reversed(self.groups):
            if finalization.is_manual and group.reduces:
                finalization.pending[group] = None
            else:
                self.context.post_backward(group)

    def leave_broken(self) -> None:
        """The forward was broken off; end sharded."""
        if self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE
        self.pending_modules.clear()
        for group in self.groups:
            group.abandon()

    def reset(self) -> None:
        """Forget the iteration; end sharded."""
        end_backward(self.watch, self.name)
        self.phase = Phase.IDLE
        self.pending_modules.clear()
        for group in self.groups:
            group.discard()
            if resets_sharded_gradients():
                group.shards.drop_gradients()


class RootContext:
    """What all units below one root share."""

    def __init__(self) -> None:
        """For one unit at first; a root hands its own to all units below."""
        self.units: list[Unit] = []
        self.observers: tuple[Observer, ...] = ()
        """Those of all groups, each once."""
        self.pool = PagePool() if pages_can_move() else None
        self.lanes = Lanes()
        self.forward_root: Unit | None = None
        self.turn = Turn()
        self.finalization = Finalization()
        self.reductions = Reductions()
        self.post_optim_event: torch.Event | None = None
        self.failures = kept_failure_handler()
        self.reached = ""
        """The unit that a backward reached last, by name."""
        self._guard: weakref.ref[BackwardGuard] | None = None
        """Of the last backward; autograd keeps it."""
        self.prefetcher: Prefetcher[Unit] = Prefetcher()
        self._unreduced: list[str] = []
        """Units with forwards of iterations that reduced nothing since the last that did."""
        self._watches_steps = False

    def begin_anew(self) -> None:
        """Its units get other groups: the next forward starts as the first one did."""
        self.units.clear()
        self._unreduced.clear()
        self.observers, self._watches_steps = (), False
        self.turn.count = 0  # ranks that come have counted none

    def wait_for_optimizer(self, device: torch.device) -> None:
        """Order the current stream behind the event the user recorded after the optimizer."""
        event, self.post_optim_event = self.post_optim_event, None
        streams = None if event is None else streams_of(device)
        if streams is not None:
            streams.current().wait_event(event)

    # Turns ------------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit) -> None:
        """``unit`` is called from outside of any other: a turn begins. See [Note: turns]."""
        self.forward_root = unit
        self.failures = failure_handler()
        self.turn.begin(self.failures.begin_step())
        if not self._watches_steps and not all(g.reshard_after_backward for g in self.groups()):
            self._watch_steps()
        if self.pool is not None:
            self.pool.recall()

    def _watch_steps(self) -> None:
        if not self._watches_steps:
            watch_steps(self.turn, self.groups())
            self._watches_steps = True

    @outside_transforms
    def refresh(self, unit: Unit) -> None:
        """Free what was kept from an earlier turn and is out of date; the rest as it is reached."""
        if self.turn.in_backward:
            return
        units = self.units if unit.is_root else (unit,)
        kept = [g for u in units for g in u.groups if g.state is State.UNSHARDED]
        for group in kept:
            if group.promised_at_step == self.turn.steps:
                group.vouch()
        free_outdated(group for group in kept if group.promised_at_step != self.turn.steps)

    def end_forward(self) -> None:
        """The outermost forward has ended."""
        self._end_turn()
        if self.turn.in_backward:
            return
        if torch.is_grad_enabled():  # a backward ends alike, unless this rank leaves it out
            self._promise(is_last=self.finalization.is_last, freed=False)
        else:
            self.settle()
            self._lend_pages()

    def _end_turn(self) -> None:
        self.forward_root = None
        self.turn.in_forward = False
        if not self.turn.in_backward:
            self.prefetcher.forget_near()

    def settle(self) -> None:
        """A turn has ended: have the host wait for copies from and to it.

        It may read gradients and write shards from now on, and follows no stream.
        """
        for unit in self.units:
            for group in unit.groups:
                if group.settles:
                    group.settle()

    def _lend_pages(self) -> None:
        if self.pool is not None:
            self.pool.lend()

    # Reductions -------------------------------------------------------------------------------

    def post_backward(self, group: ParameterGroup) -> None:
        """Reduce and free, or accumulate."""
        if not group.reduces:
            self.finalization.pending[group] = None
            self._watch_steps()
            group.accumulate()
            if group.reshard_after_backward:
                group.reshard()
            return
        self.finalization.pending.pop(group, None)
        if group in self.reductions.partial:
            self.reductions.finish_partial(group)
        gradients = group.take_gradients()
        if group.reshard_after_backward:
            group.reshard()
        if gradients or group.expects_gradients():
            self.reductions.start(group, gradients, is_last=self.finalization.is_last)

    def holds_partial(self, group: ParameterGroup) -> bool:
        """Whether ``group`` has, or is about to have, sums that lack those of other replicas."""
        if not group.roles.is_replicated:
            return False
        return group in self.reductions.partial or group.gradients.waiting.awaits_replicas

    # End of backward --------------------------------------------------------------------------

    def queue_end_of_backward(self) -> None:
        """Have :meth:`end_backward` called once when this backward has ended."""
        if not self.turn.in_backward:
            self.finalization.begin_backward()
            self.turn.in_backward = True
            self.reached = ""
            guard = BackwardGuard(self.end_backward, self._backward_broke)
            self._guard = weakref.ref(guard)
            queue_backward_callback(guard)

    @outside_transforms
    def end_backward(self) -> None:
        """Reduce what no post-backward reached, finish reductions, and leave all units idle.

        Or leave that to the user: see [Note: manual finalization].
        """
        self.turn.in_backward = False
        self._end_turn()
        for unit in self.units:
            unit.pending_modules.clear()
            if unit.phase is not Phase.POST_BACKWARD:
                unit.end_unreached()
            unit.phase = Phase.IDLE
        self.reductions.finish_sums()
        if self.finalization.is_last:
            self.end_iteration()
        else:
            if streams_of(self.units[0].roles.device) is None:
                # The host reads gradients when a backward has returned: to clip, step or convert.
                self.reductions.finish()
            self._promise(is_last=False)
            self._lend_pages()
        self.settle()

    def _promise(self, *, is_last: bool, ends: bool = False, freed: bool = True) -> None:
        """Whether micro-batches of the iteration follow. See [Note: kept parameters].

        ``freed``: for groups too that the backward frees.
        """
        for group in self.groups() if self._watches_steps else ():
            if not (is_last and group.reduces):
                if freed or not group.reshard_after_backward:
                    group.promised_at_step = group.made_at_step
            elif ends:
                group.promised_at_step = None

    def end_iteration(self) -> None:
        """The last backward has ended: gradients are in place, and nothing of it is kept."""
        self.reductions.finish()
        left = self.prefetcher.order.left()
        forwards = (unit.name for unit in left if not unit.may_be_skipped())
        if self._reduces():
            self._tell_ended(chain(self._unreduced, forwards))
            self._unreduced.clear()
        else:
            self._unreduced.extend(forwards)
        self.reductions.place_held()
        self.prefetcher.order.end_step()
        self._end_step()
        self._promise(is_last=True, ends=True)
        self.finalization.end_iteration()
        self._lend_pages()
        tell(self.observers, "on_step_end")

    def _reduces(self) -> bool:
        """Whether backwards reduce, by settings, which are the same on all ranks."""
        may_reduce = True  # a root without groups has no settings
        for unit in self.units:
            for group in unit.groups:
                if group.reduces:
                    return True
                may_reduce = False
        return may_reduce

    def _tell_ended(self, forwards: Iterable[str]) -> None:
        try:
            self.failures.end_step((each for u in self.units for each in u.ended()), forwards)
        except Exception:  # sums may be of other ranks' gradients, or of aborted transfers
            for group in self.groups():
                group.shards.drop_gradients()
            raise

    def _end_step(self) -> None:
        """Free what was prefetched for nothing, and what optimizers changed in this backward.

        A gather still under way would read shards that the optimizer is about to change.
        """
        for unit in self.units:
            for group in unit.groups:
                group.reduced.clear()
                if group.state is not State.SHARDED:
                    is_stale = group.made_at_step != self.turn.steps
                    under_way = group.state is State.GATHERING
                    if group.reshard_after_backward or is_stale or under_way:
                        group.reshard()
                if group.block_size is not None:
                    group.drop_block()

    def remember(self) -> Callable[[], None]:
        """What puts back, after :meth:`reset`, gradients that wait for a later backward.

        Reductions under way are ended first.

        Raises:
            LifecycleError: while a handle is to be waited for.
        """
        self.finalization.check_line("an attempt")
        self.reductions.finish()
        pending, may_hold = dict(self.finalization.pending), self.reductions.remember()
        groups = [group.gradients.remember() for group in self.groups()]

        def put_back() -> None:
            self.finalization.pending.update(pending)
            self.reductions.put_back(may_hold)
            for group in groups:
                group()

        return put_back

    def wait_for_reduction(self, reduction: Reduction) -> None:
        """End the iteration whose last reductions were started apart.

        Raises:
            LifecycleError: when a reset has dropped them.
        """
        self.finalization.check_valid(reduction)
        self.end_iteration()
        self.finalization.leave_line()

    def forward_broke(self) -> None:
        """An exception passes through the outermost forward: nothing of it is left gathered.

        The next forward starts as if this one had not been; backwards of earlier ones may follow.
        """
        names = [unit.name for unit in self.units if unit.phase is Phase.FORWARD]
        part = Part(names[-1] if names else "", kind=Kind.FORWARD)
        self.failures.explain(part, sys.exc_info()[1])
        for unit in self.units:
            unit.leave_broken()
        self.prefetcher.reset()
        self.end_forward()
        self._tell_broken()

    def leave_recomputation(self) -> None:
        """What a backward recomputed is over, before its end or at it; units stay gathered."""
        for unit in self.units:
            if unit.phase is Phase.FORWARD:
                unit.phase = Phase.IDLE
            unit.pending_modules.clear()
        self.end_forward()

    def _backward_broke(self, error: Exception | None, caller: FrameType | None) -> None:
        for group in self.groups():
            group.promised_at_step = None
        self.failures.explain(Part(self.reached, kind=Kind.BACKWARD), error, caller)

    def groups(self) -> Iterator[ParameterGroup]:
        """Those of all units, outermost first."""
        return (group for unit in self.units for group in unit.groups)

    def reset(self) -> None:
        """Make the next iteration valid after an exception in forward or backward.

        Raises:
            LifecycleError: while another root that shares the communication reduces.
        """
        self.finalization.check_reset()
        if self._guard is not None and (guard := self._guard()) is not None:
            guard.give_up()
        with self.failures.reset(sys.exc_info()[1], is_in_mid_step=self._is_in_mid_step):
            self.reductions.drop()
            self.turn.in_backward = False
            self.prefetcher.reset()
            # Ranks may have recorded other orders in the step that they lost, and would prefetch
            # by them: on a device gathers pair by order.
            self.prefetcher.order.forget()
            self._unreduced.clear()
            for unit in self.units:
                unit.reset()
            self.end_forward()
            self.finalization.reset()
        self._tell_broken()

    def _tell_broken(self) -> None:
        """The step was broken off."""
        tell(self.observers, "on_broken")

    @property
    def _is_in_mid_step(self) -> bool:
        """Whether others may wait for this rank: in a backward that it has not begun, say."""
        gathers = (g.state is State.GATHERING for g in self.groups())
        under_way = self.reductions or any(gathers)
        return self.finalization.is_busy or bool(under_way)


# finalize_backward() ------------------------------------------------------------------------------

_CALL = "finalize_backward()"


def finalize(root: Unit) -> None:
    """Reduce what is pending, and end the iteration.

    Raises:
        LifecycleError: when there is nothing that could be ended so; nothing was changed then.
    """
    _check(root)
    _reduce_pending(root.context)
    root.context.end_iteration()


def start_to_finalize(root: Unit) -> Reduction:
    """As :func:`finalize`, leaving the last reductions on their way.

    Raises:
        LifecycleError: as there, and while other roots that share the communication are at work.
    """
    _check(root)
    finalization = root.context.finalization
    reduction = finalization.take_line()
    try:
        _reduce_pending(root.context)
    except BaseException:
        finalization.leave_line()  # there will be no handle; reset_iter_state() does the rest
        raise
    return reduction


def _reduce_pending(context: RootContext) -> None:
    finalization = context.finalization
    finalization.is_ending = True
    for unit in reversed(context.units):
        for group in reversed(unit.groups):
            if group in finalization.pending:
                context.post_backward(group)
            elif group.reshard_after_backward:
                group.reshard()


def _check(unit: Unit) -> None:
    context = unit.context
    finalization = context.finalization
    finalization.check_line(f"the next {_CALL}")
    if not unit.is_root:
        raise LifecycleError(
            f"{_CALL} was called on '{unit.name}', which is not the root. Call it on the outermost "
            "sharded module."
        )
    if not finalization.is_manual:
        raise LifecycleError(
            f"{_CALL} was called, but finalization is automatic: every backward ends the "
            "reductions. Call set_manual_backward_finalization(True) before the forward."
        )
    if context.turn.in_backward:
        raise LifecycleError(
            f"{_CALL} was called during a backward. Call it after the last backward has returned."
        )
    for group in context.groups():
        _check_replicas(group, context)


def _check_replicas(group: ParameterGroup, context: RootContext) -> None:
    if context.holds_partial(group):
        raise LifecycleError(
            f"{_CALL} was called while group '{group.name}' holds partial sums of replicas, which "
            "it does not support (nor does torch). Do not call set_requires_all_reduce(False), or "
            "call set_manual_backward_finalization(False)."
        )
    is_reduced = group in context.finalization.pending and group.reduces
    if is_reduced and group.roles.is_replicated and not group.all_reduces:
        raise LifecycleError(
            f"{_CALL} was called while group '{group.name}' does not sum over replicas. Call "
            "set_requires_all_reduce(True) before."
        )
