"""When things happen in a step of one root: its order, what starts early, and how a backward ends.

[Note: order]
Units *enter* their forwards outermost first, which is the order they are gathered in, and *leave*
them innermost first, which backward follows from the end. Both are noted here, with repetitions.

Entering follows a record: the first forward of a caller (a unit that is called from outside of any
other) only records, later ones expect what came next the last time. A forward that departs from its
record expects nothing more, and its own order is what the caller's next one follows. Ranks that run
their units in the same order therefore expect the same.

Leaving leaves notes that a backward takes, latest first, so that several forwards may come before
one backward. Forwards whose backward never comes, as in evaluation, leave notes too: reentrant
checkpointing runs forwards that have a backward without grad mode, so grad mode does not tell. The
oldest are forgotten when there are too many: a backward that does come loses its prefetch at most.

[Note: prefetch]
When a unit has been gathered for its forward, the gather of the one that is expected next starts
and runs while the unit computes. What was gathered early stays until it is used or the outermost
forward has ended, so that a unit is gathered once in a forward whether or not it was foreseen. In
backward the unit that left its forward before is gathered while the one that starts computes.

A gather reads a shard on the device; a storage elsewhere needs time to bring it there. Storages
that ask are told from the second forward on: in forward, of the units behind the one that starts,
in backward of those before the one whose gather was just started. A wrong guess costs the transfer,
never a value: what no unit gathered is dropped when the forward or backward ends, since shards may
change then (see [Note: turns] of the freshness).

[Note: reductions in flight]
One is left in flight while the next unit's backward computes, and gives its memory up before
another starts. Where replicas are still being summed then, it is finished with the backward only,
so that the computation waits for no link that is slower than those of the shard axis; unless its
storage moves gradients off the device, which it should do meanwhile.

[Note: manual finalization]
A backward ends its iteration by itself: what no post-backward reached is reduced, and sharded
gradients are in place when it returns. After ``set_manual_backward_finalization(True)`` it leaves
that to ``finalize_backward()``, which comes after any number of backwards (a pipeline's
micro-batches). Groups that have something to reduce then are *pending*: those that accumulated, and
those that no post-backward reached. Which of the two holds is settled when the first backward of an
iteration starts, and holds to the iteration's end.

Started asynchronously, the last reductions are on their way until the handle is waited for. Until
then no root on the same *line* (those of one ``share_comm_ctx``) starts anything else.

[Note: broken backwards]
Autograd calls nothing when an exception ends a backward. But it keeps what is to be called when
the backward ends well, and lets go of it when the backward is over either way. So a guard is kept
there: if it goes without having been called, an exception passed. Which one is not known at that
moment: it is on its way through C++, to the Python frame that called autograd. On a device another
thread runs backwards, which may let go of the guard later than the user resets the model.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Generic, TypeVar
from weakref import WeakSet

from torch import Tensor

from polyshard._torch.private import in_backward, outside_transforms
from polyshard.errors import LifecycleError
from polyshard.group.group import ParameterGroup, State
from polyshard.program.executor import abandon
from polyshard.program.ops import Frame

U = TypeVar("U", bound=Hashable)

FORWARDS = 64
"""Calls from outside whose notes are kept while no backward ends an iteration."""


class StepOrder(Generic[U]):
    """The order in which units ran, of any hashable kind of unit. See [Note: order]."""

    def __init__(self) -> None:
        self._records: dict[U, list[U]] = {}
        self._caller: U | None = None
        self._entered: list[U] = []
        self._expected: Sequence[U] = ()
        self._left: list[U] = []
        self._places: dict[U, list[int]] = {}
        self._starts: list[int] = []

    # Forward ----------------------------------------------------------------------------------

    def begin(self, caller: U) -> None:
        """``caller`` is called from outside of any other."""
        if len(self._starts) >= FORWARDS:
            self._forget_oldest()
        self._starts.append(len(self._left))
        self._caller = caller
        self._entered = []
        self._expected = self._records.get(caller, ())

    def enter(self, unit: U) -> U | None:
        """``unit`` starts its forward; returns the unit that is expected after it, if any."""
        place = len(self._entered)
        self._entered.append(unit)
        if place >= len(self._expected) or self._expected[place] is not unit:
            self._expected = ()
        return self._expected[place + 1] if place + 1 < len(self._expected) else None

    def following(self, count: int) -> Sequence[U]:
        """Up to ``count`` units that are expected after the one that entered last."""
        place = len(self._entered)
        return self._expected[place : place + count]

    def leave(self, unit: U) -> None:
        """``unit`` has ended its forward; once per forward."""
        self._places.setdefault(unit, []).append(len(self._left))
        self._left.append(unit)

    def end(self) -> bool:
        """What :meth:`begin` began has ended; whether it was in another order than the last one."""
        if self._caller is None:
            return False
        is_new = self._records.get(self._caller) != self._entered
        self._records[self._caller] = self._entered
        self._abandon()
        return is_new

    def recorded(self) -> Iterator[U]:
        """Every unit of every record, with repetitions."""
        for record in self._records.values():
            yield from record

    # Backward ---------------------------------------------------------------------------------

    def before(self, unit: U) -> U | None:
        """The unit that left before ``unit`` did the last time; takes the note of ``unit``."""
        places = self._places.get(unit)
        if not places:
            return None
        place = places.pop()
        return self._left[place - 1] if place else None

    def preceding(self, unit: U, count: int) -> Sequence[U]:
        """Up to ``count`` units that left before ``unit`` did the last time, latest first."""
        places = self._places.get(unit)
        if not places:
            return ()
        return self._left[max(places[-1] - count, 0) : places[-1]][::-1]

    def left(self) -> Sequence[U]:
        """Every unit whose forward has ended in this iteration, in order, with repetitions."""
        return self._left

    # End of an iteration ----------------------------------------------------------------------

    def end_step(self) -> None:
        """The last backward of an iteration has ended: no note will be taken any more."""
        self._left.clear()
        self._places.clear()
        self._starts.clear()

    def reset(self) -> None:
        """Forget the iteration under way; records stay."""
        self._abandon()
        self.end_step()

    def forget(self) -> None:
        """Every forward is the first of its caller again."""
        self._records.clear()

    def _abandon(self) -> None:
        self._caller, self._entered, self._expected = None, [], ()

    def _forget_oldest(self) -> None:
        """Half of all forwards, so that this is seldom done."""
        kept = self._starts[len(self._starts) // 2 :]
        first = kept[0]
        self._starts = [start - first for start in kept]
        del self._left[:first]
        self._places = {
            unit: [place - first for place in places if place >= first]
            for unit, places in self._places.items()
        }


# Ahead of use -------------------------------------------------------------------------------------


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
        """Forget the iteration under way; the caller frees all units."""
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


# Reductions ---------------------------------------------------------------------------------------


class Reductions:
    """Those of one root, oldest first."""

    def __init__(self) -> None:
        self.most = 1
        """How many may hold what they send."""
        self._sending: deque[tuple[ParameterGroup, Frame]] = deque()
        self._summing: deque[tuple[ParameterGroup, Frame]] = deque()
        self._may_hold: dict[ParameterGroup, None] = {}
        self.partial: set[ParameterGroup] = set()
        """Those with sums on their way that will lack those of other replicas."""

    def __bool__(self) -> bool:
        return bool(self._sending or self._summing)

    def start(self, group: ParameterGroup, gradients: dict[int, Tensor], *, is_last: bool) -> None:
        """Start to reduce, after earlier reductions have made room."""
        while len(self._sending) >= self.most:
            oldest, frame = self._sending.popleft()
            if frame.program.early:
                oldest.free_sent(frame)
                self._summing.append((oldest, frame))
            else:
                oldest.finish_reduction(frame)
        frame = group.start_reduction(gradients, is_last=is_last)
        self._sending.append((group, frame))
        if not frame.key.all_reduces:
            self.partial.add(group)
        if not is_last:
            self._may_hold[group] = None

    def finish_partial(self, group: ParameterGroup) -> None:
        """Keep the partial sums of ``group``: the next reduction adds to them."""
        while any(g is group for g, _ in self._sending):
            oldest, frame = self._sending.popleft()
            oldest.finish_reduction(frame)
        self.partial.discard(group)

    def finish_sums(self) -> None:
        """A backward has ended: put in place what replicas were still summing."""
        while self._summing:
            group, frame = self._summing.popleft()
            group.finish_reduction(frame)

    def finish(self) -> None:
        """Put all sharded gradients in place."""
        self.finish_sums()
        while self._sending:
            group, frame = self._sending.popleft()
            group.finish_reduction(frame)
        self.partial.clear()

    def place_held(self) -> None:
        """Put in place what earlier backwards left, and no reduction of the last took along."""
        for group in self._may_hold:
            group.place_held()
        self._may_hold.clear()

    def remember(self) -> dict[ParameterGroup, None]:
        """Groups that may hold gradients now; :meth:`put_back` takes them."""
        return dict(self._may_hold)

    def put_back(self, may_hold: dict[ParameterGroup, None]) -> None:
        """These groups may hold gradients again."""
        self._may_hold.update(may_hold)

    def drop(self) -> None:
        """End all of them, and forget what came of them."""
        for _, frame in (*self._summing, *self._sending):
            abandon(frame)
        self._summing.clear()
        self._sending.clear()
        self._may_hold.clear()
        self.partial.clear()


# The end of a backward ----------------------------------------------------------------------------


_WAIT_FIRST = "Call wait() on the GradientReductionHandle that finalize_backward() returned before"


class Reduction:
    """Reductions that a handle waits for; told from others by identity."""


@dataclass(eq=False)
class Line:
    """What roots that share their communication have in common."""

    roots: WeakSet[Finalization] = field(default_factory=WeakSet)
    reduction: Reduction | None = None
    owner: Finalization | None = None
    """The root whose ``reduction`` is on its way."""


class Finalization:
    """Of one root. See [Note: manual finalization]."""

    def __init__(self) -> None:
        self.is_manual = False
        """Whether an iteration, the one under way or else the next, ends by a call."""
        self.is_last_backward = True
        """What the user says of backwards that end by themselves."""
        self.is_ending = False
        """Whether a call ends the iteration now."""
        self.is_busy = False
        """Whether forwards or backwards have begun that no end of an iteration followed yet."""
        self.pending: dict[ParameterGroup, None] = {}
        self.line = Line()
        self.line.roots.add(self)
        self._has_begun = False
        """Whether a backward of the iteration has started, so that the mode holds to its end."""

    def join(self, line: Line) -> None:
        """Share the communication of other roots."""
        self.line = line
        line.roots.add(self)

    # Modes ------------------------------------------------------------------------------------

    def choose(self, enabled: bool) -> None:
        """What the user wants from the next backward on.

        Raises:
            LifecycleError: when it is too late for that.
        """
        if enabled != self.is_manual and in_backward():
            raise LifecycleError(
                "set_manual_backward_finalization() cannot change the mode during a backward. Call "
                "it before."
            )
        if self._has_begun and enabled != self.is_manual:
            raise LifecycleError(
                "set_manual_backward_finalization() cannot change the mode after a backward of the "
                "iteration has started. End the iteration with finalize_backward() (or drop it "
                "with reset_iter_state()) first."
            )
        self.is_manual = enabled

    def begin_backward(self) -> None:
        """A backward starts; the first one of an iteration settles how that ends."""
        self._has_begun = True

    @property
    def is_last(self) -> bool:
        """Whether no backward of this iteration will follow."""
        return self.is_ending if self.is_manual else self.is_last_backward

    def end_iteration(self) -> None:
        """The iteration has ended, or was given up."""
        self._has_begun = False
        self.is_ending = self.is_busy = False

    # The line ---------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether a handle of this root is still to be waited for."""
        return self.line.owner is self

    def check_line(self, what: str) -> None:
        """Refuse to start ``what`` while the line is taken.

        Raises:
            LifecycleError: while a handle is to be waited for.
        """
        if self.line.owner is None:
            return
        whose = "this module" if self.waits else "another root of the same share_comm_ctx()"
        raise LifecycleError(f"gradients of {whose} are still being reduced. {_WAIT_FIRST} {what}.")

    def take_line(self) -> Reduction:
        """From now on a handle is to be waited for.

        Raises:
            LifecycleError: while other roots of the line are at work.
        """
        if any(root.is_busy for root in self.line.roots if root is not self):
            raise LifecycleError(
                "finalize_backward(async_op=True) was called while another root of the same "
                "share_comm_ctx() is between its forward and the end of its backward. End that "
                "first, call finalize_backward() without async_op, or do not share."
            )
        self.line.owner, self.line.reduction = self, Reduction()
        return self.line.reduction

    def check_valid(self, reduction: Reduction) -> None:
        """Refuse a handle whose reductions were dropped.

        Raises:
            LifecycleError: after ``reset_iter_state()``.
        """
        if self.line.reduction is not reduction:
            raise LifecycleError(
                "this GradientReductionHandle is no longer valid: reset_iter_state() dropped the "
                "reductions that it waits for, and their gradients."
            )

    def leave_line(self) -> None:
        """Nothing of this root is waited for any more."""
        if self.waits:
            self.line.owner = self.line.reduction = None

    def check_reset(self) -> None:
        """Refuse to reset what another root is waited for.

        Raises:
            LifecycleError: while a handle of another root of the line is to be waited for.
        """
        if self.line.owner is not None and not self.waits:
            raise LifecycleError(
                "reset_iter_state() cannot drop the reductions of another root of the same "
                f"share_comm_ctx(). {_WAIT_FIRST}, or reset that root."
            )

    def reset(self) -> None:
        """Forget the iteration; a handle still waited for is no longer valid."""
        self.pending.clear()
        self.leave_line()
        self.end_iteration()


Broke = Callable[[Exception | None, FrameType | None], None]


class BackwardGuard:
    """Has ``end`` called when a backward ends well, and ``broke`` when not."""

    def __init__(self, end: Callable[[], None], broke: Broke) -> None:
        """To be queued as a callback, and kept nowhere else.

        ``broke`` is told the exception, if it is known.
        """
        self._end = end
        self._broke = broke
        self._is_over = False

    def __call__(self) -> None:
        """The backward ended well, as far as the model is concerned."""
        self._is_over = True
        try:
            self._end()
        except Exception as error:
            self._broke(error, None)
            raise

    def give_up(self) -> None:
        """The model is reset: if the backward is not over, an exception has passed."""
        if not self._is_over:
            self._is_over = True
            self._broke(None, None)

    def __del__(self) -> None:
        """See [Note: broken backwards]."""
        if not (self._is_over or sys.is_finalizing()):
            self._broke(None, sys._getframe().f_back)
