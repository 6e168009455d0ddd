"""The order of a step, kept once: which unit ran before which, and which is expected next.

[Note: order]
Units *enter* their forwards outermost first, which is the order they are gathered in, and *leave*
them innermost first, which backward follows from the end. Both are noted here, with repetitions.

Entering follows a record: the first forward of a caller (a unit that is called from outside of any
other) only records, later ones expect what came next the last time. A forward that departs from its
record expects nothing more, and its own order is what the caller's next one follows. Ranks that run
their units in the same order therefore expect the same.

Leaving leaves notes that a backward takes, latest first, so that several forwards may come before
one backward. Forwards whose backward never comes, as in evaluation, leave notes too: without grad
mode reentrant checkpointing runs forwards that have a backward, so nobody can tell. The oldest are
forgotten when there are too many, which costs a backward that does come no more than its prefetch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)

FORWARDS = 64
"""Calls from outside whose notes are kept while no backward ends an iteration."""


class StepOrder(Generic[U]):
    """Who came before whom, of any kind of unit that can be told from others. See [Note: order]."""

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
