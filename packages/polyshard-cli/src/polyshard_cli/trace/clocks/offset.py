"""Offsets between two clocks, from round trips, and a time line through several of them.

[Note: offsets]
A rank reads its clock, asks the reference for the time there, and reads its clock again. The answer
was given in between, so the difference of the reference and the middle is off by no more than half
of what the round trip took, whichever way was the slower one. Of several round trips the quickest
says most. (NTP estimates the same way, RFC 5905 section 8.) Clocks do not run equally fast: between
the first and the last offset the difference is taken to change evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Offset", "Timeline", "best_of"]


@dataclass(frozen=True)
class Offset:
    """What has to be added to a clock to get the reference's, all in nanoseconds.

    ``at_ns`` is when that was found, by the clock itself; the true offset then differs from
    ``offset_ns`` by no more than ``uncertainty_ns``.
    """

    at_ns: int
    offset_ns: int
    uncertainty_ns: int


def best_of(ask: Callable[[], int], clock: Callable[[], int], rounds: int) -> Offset:
    """The offset that the quickest of so many round trips gives. See [Note: offsets].

    Args:
        ask: gives the reference's time.
        clock: the own one.
        rounds: at least 1.
    """
    return min((_round_trip(ask, clock) for _ in range(rounds)), key=lambda o: o.uncertainty_ns)


def _round_trip(ask: Callable[[], int], clock: Callable[[], int]) -> Offset:
    before = clock()
    reference = ask()
    after = clock()
    middle = (before + after) // 2
    return Offset(middle, reference - middle, (after - before + 1) // 2)


class Timeline:
    """Times of one clock in those of the reference."""

    def __init__(self, offsets: Iterable[Offset]) -> None:
        """Through ``offsets``, at least one."""
        self._offsets: Sequence[Offset] = sorted(offsets, key=lambda o: o.at_ns)
        assert self._offsets

    def reference_ns(self, at_ns: int) -> int:
        """What the reference showed when this clock showed ``at_ns``."""
        first, last = self._segment(at_ns)
        elapsed = last.at_ns - first.at_ns
        if not elapsed:
            return at_ns + first.offset_ns
        change = last.offset_ns - first.offset_ns
        return at_ns + first.offset_ns + round(change * (at_ns - first.at_ns) / elapsed)

    @property
    def first(self) -> Offset:
        """The earliest."""
        return self._offsets[0]

    @property
    def uncertainty_ns(self) -> int:
        """No time between the first and the last offset is off by more, if drift is even."""
        return max(o.uncertainty_ns for o in self._offsets)

    @property
    def drift(self) -> float:
        """Seconds that the reference gains in a second of this clock; 0 where one offset is all."""
        first, last = self._offsets[0], self._offsets[-1]
        elapsed = last.at_ns - first.at_ns
        return (last.offset_ns - first.offset_ns) / elapsed if elapsed else 0.0

    def _segment(self, at_ns: int) -> tuple[Offset, Offset]:
        offsets = self._offsets
        for first, last in pairwise(offsets):
            if at_ns <= last.at_ns:
                return first, last
        return offsets[-2 if len(offsets) > 1 else -1], offsets[-1]
