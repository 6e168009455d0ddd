"""For ranks that wait for each other outside of transfers: which failed, and which will not come.

The alarm wakes ranks that wait in a transfer. A rank that waits at the store, or for a file, asks
here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from polyshard.errors import PeerError
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.courier import UnansweredError
from polyshard_resilience.alarm.current import current_alarm
from polyshard_resilience.alarm.register import Silence
from polyshard_resilience.alarm.reports import NOBODY, Cause, Report


def tell(error: BaseException) -> None:
    """Have ranks that wait for this one in a transfer know that it will not come."""
    alarm = current_alarm()
    if isinstance(error, PeerError) or alarm.board is None:
        return
    alarm.look()
    if alarm.report is None:
        alarm.fail("in an attempt", error)


def tell_again(error: BaseException) -> None:
    """As :func:`tell`, for ranks that began anew since: to them, what was told before is over."""
    alarm = current_alarm()
    if not isinstance(error, PeerError):
        alarm.begin_anew()
        tell(error)


def go_on() -> None:
    """What was told until now is over: all ranks know of it, and none has begun anything since."""
    alarm = current_alarm()
    alarm.look()
    alarm.begin_anew()


def go_on_to(epoch: int) -> None:
    """What was told before ``epoch`` is over; in it a rank that came sooner may have failed."""
    alarm = current_alarm()
    if alarm.epoch < epoch:
        alarm.look()
        alarm.begin_anew(epoch)


def lost(said: Mapping[int, str]) -> None:
    """These ranks will not come back, as all others know by now."""
    alarm = current_alarm()
    for rank, text in said.items():
        if rank not in (NOBODY, alarm.rank):
            alarm.gone.setdefault(rank, Report(rank, Cause.GONE, text))
            alarm.told.add(rank)


@dataclass(frozen=True)
class Gathering:
    """A wait for all of some ranks, outside of transfers. See [Note: ranks apart]."""

    ranks: tuple[int, ...]
    key: str
    count: int

    def peers(self) -> tuple[int, ...]:
        """See :class:`polyshard_resilience.alarm.alarm.Waiting`."""
        return self.ranks

    def place(self) -> tuple[int, str, int]:
        """See there."""
        return NOBODY, self.key, self.count


@contextmanager
def gathering(ranks: Sequence[int], key: str, count: int, what: str) -> Iterator[None]:
    """A block that waits until all of ``ranks`` have come for the ``count``-th time to ``key``."""
    alarm = current_alarm()
    alarm.gathered[key] = count
    alarm.doing, alarm.waiting = what, Gathering(tuple(ranks), key, count)
    try:
        yield
    finally:
        alarm.waiting = None


@dataclass(frozen=True)
class Absent:
    """Why ranks will not come, by rank; and whether that is for good."""

    said: dict[int, str]
    is_final: bool


@dataclass
class Roll:
    """Which of ``ranks`` are still there, for a rank that asks now and then while it waits."""

    ranks: Sequence[int]
    _silence: Silence = field(default_factory=Silence)

    def call(self) -> Absent | None:
        """Those that will not come, of which all others are told; ``None`` if all may."""
        alarm = current_alarm()
        if alarm.board is None:
            return None
        alarm.look()
        alarm.register.read_host()
        alarm.look_at_processes(alarm.expected(self.ranks))
        found = {r: alarm.gone[r] for r in self.ranks if r in alarm.gone}
        for rank in alarm.register.in_sight(self.ranks):
            if rank not in found and rank != alarm.rank:
                report = alarm.register.report_of(rank) or self._silent(alarm, rank)
                found.update({} if report is None else {rank: report})
        gone = {r: report for r, report in found.items() if report.cause is Cause.GONE}
        alarm.gone.update(gone)
        report = alarm.report
        if report is not None and report.cause is Cause.STOPPED and report.rank in self.ranks:
            found.setdefault(report.rank, report)
        said = {r: f"{report.said} {report.remedy}" for r, report in found.items()}
        if gone:
            return Absent({r: report.text for r, report in gone.items()}, is_final=True)
        return Absent(said, is_final=False) if said else None

    def _silent(self, alarm: Alarm, rank: int) -> Report | None:
        """That a rank beside this one, on another host, does not pulse any more, if so."""
        with suppress(UnansweredError):
            return alarm.register.silent(rank, self._silence, time.monotonic())
        return None
