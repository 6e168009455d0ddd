"""Whether one use of memory happens before another: vector clocks of streams and host threads.

[Note: happens before]
A stream does what it was given in order; so does a thread of the host. Between them there is order
only where a call made it: launching (the host before what it launches), an event that a stream
recorded and another waits for, a host that waits for either. Each *actor*, stream or thread, has a
clock that counts its steps, and knows which step of every other actor has surely ended. Two uses of
the same bytes, at least one a write, must be ordered; if not, an accelerator may do them in either
order, and that is a race whatever the values were here.

Memory that is given back goes to the stream it was taken on, without waiting for others: what that
stream is given next may write it at once. So giving back counts as a write by that stream. And
memory that is taken may have been used until now by all that its stream was given before: any other
use has to come after that.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

Clock = dict[str, int]
"""By actor, the last of its steps that is known to have ended."""


class Timeline:
    """What every actor knows of the others."""

    def __init__(self) -> None:
        self._known: dict[str, Clock] = {}

    def known(self, actor: str) -> Clock:
        """What has surely ended when ``actor`` does its next step."""
        return self._known.setdefault(actor, {})

    def step(self, actor: str) -> int:
        """``actor`` does something; the number of that step."""
        known = self.known(actor)
        known[actor] = known.get(actor, 0) + 1
        return known[actor]

    def learn(self, actor: str, clock: Clock) -> None:
        """``actor`` continues after all that ``clock`` knows of."""
        known = self.known(actor)
        for other, step in clock.items():
            if known.get(other, 0) < step:
                known[other] = step

    def snapshot(self, actor: str) -> Clock:
        """What has ended when ``actor`` has done all that it was given so far."""
        return dict(self.known(actor))


@dataclass(frozen=True)
class Use:
    """Bytes ``[start, stop)``, used in one step of an actor."""

    start: int
    stop: int
    writes: bool
    actor: str
    step: int
    what: str

    def __str__(self) -> str:
        """For a report."""
        return f"{self.what} {'writes' if self.writes else 'reads'} on {self.actor}"


@dataclass(frozen=True)
class Race:
    """Two uses that nothing orders."""

    earlier: Use
    later: Use

    def __str__(self) -> str:
        """For a report."""
        nbytes = min(self.earlier.stop, self.later.stop) - max(self.earlier.start, self.later.start)
        return f"{nbytes} bytes: {self.earlier}; {self.later}; nothing orders them"


@dataclass
class Allocation:
    """Memory that was taken together, and how it was used since."""

    start: int
    stop: int
    home: str | None
    """The stream it goes back to; ``None`` for page-locked memory of the host, whose allocator
    waits for copies by itself."""
    uses: list[Use] = field(default_factory=list)


class Ledger:
    """All memory that was seen, and the races found. See [Note: happens before]."""

    def __init__(self, timeline: Timeline) -> None:
        """``timeline`` knows the order."""
        self.races: list[Race] = []
        self.counted = 0
        self._actors: dict[str, set[str]] = {}
        self._timeline = timeline
        self._starts: list[int] = []
        self._at: dict[int, Allocation] = {}

    def take(self, start: int, nbytes: int, home: str | None) -> None:
        """Memory was taken for work of ``home``, and may be what that has used until now."""
        if not nbytes:
            return
        for old in list(self._overlapping(start, start + nbytes)):
            self._remove(old)
        taken = Allocation(start, start + nbytes, home)
        before = 0 if home is None else self._timeline.known(home).get(home, 0)
        if home is not None and before:
            taken.uses.append(Use(start, taken.stop, True, home, before, "its owner before"))
        self._add(taken)

    def take_on_host(self, start: int, nbytes: int, home: str) -> None:
        """Memory of the host was taken, which no stream has used; it is given back as others."""
        self.take(start, nbytes, None)
        if nbytes:
            self._at[start].home = home

    def know(self, start: int, nbytes: int, home: str | None) -> None:
        """Memory was seen that was taken before, or another name for memory known already."""
        stop = start + nbytes
        found = list(self._overlapping(start, stop))
        if not nbytes or (found and found[0].start <= start and stop <= found[0].stop):
            return
        joined = Allocation(start, stop, found[0].home if found else home)
        for old in found:
            joined.start, joined.stop = min(joined.start, old.start), max(joined.stop, old.stop)
            joined.uses += old.uses
            self._remove(old)
        self._add(joined)

    def allocations(self) -> list[Allocation]:
        """Memory that is in use."""
        return list(self._at.values())

    def seen(self, what: str) -> set[str]:
        """Which actors ever did ``what``."""
        return self._actors.get(what, set())

    def use(self, used: Use) -> None:
        """Compare with every earlier use of the same bytes."""
        self.counted += 1
        self._actors.setdefault(used.what, set()).add(used.actor)
        for allocation in self._overlapping(used.start, used.stop):
            kept = []
            for earlier in allocation.uses:
                overlaps = earlier.start < used.stop and used.start < earlier.stop
                ordered = self._is_before(earlier, used.actor)
                if overlaps and not ordered and (earlier.writes or used.writes):
                    self.races.append(Race(earlier, used))
                covered = used.start <= earlier.start and earlier.stop <= used.stop
                # Whatever is ordered after this use is ordered after that one too.
                if not (ordered and covered and (used.writes or not earlier.writes)):
                    kept.append(earlier)
            kept.append(used)
            allocation.uses = kept

    def give_back(self, start: int, host: str) -> None:
        """Memory returns to its stream, told by the thread ``host``."""
        allocation = self._at.get(start)
        if allocation is None:
            return
        home = allocation.home
        if home is None:
            self._remove(allocation)
            return
        self._timeline.learn(home, self._timeline.known(host))
        freed = Use(start, allocation.stop, True, home, 0, "its next owner")
        for earlier in allocation.uses:
            if not self._is_before(earlier, home):
                self.races.append(Race(earlier, freed))
        self._remove(allocation)

    def _is_before(self, earlier: Use, actor: str) -> bool:
        return self._timeline.known(actor).get(earlier.actor, 0) >= earlier.step

    def _overlapping(self, start: int, stop: int) -> Iterator[Allocation]:
        place = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while place < len(self._starts) and self._starts[place] < stop:
            found = self._at[self._starts[place]]
            place += 1
            if found.stop > start:
                yield found

    def _add(self, allocation: Allocation) -> None:
        bisect.insort(self._starts, allocation.start)
        self._at[allocation.start] = allocation

    def _remove(self, allocation: Allocation) -> None:
        del self._at[allocation.start]
        del self._starts[bisect.bisect_left(self._starts, allocation.start)]
