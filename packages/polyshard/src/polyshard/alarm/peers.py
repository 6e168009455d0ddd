"""For ranks that wait for each other outside of transfers: who failed, and who will not come.

The alarm sees to those who wait in a transfer. Who waits at the store, or for a file, asks here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyshard.alarm.alarm import Alarm
from polyshard.alarm.courier import UnansweredError
from polyshard.alarm.current import current_alarm
from polyshard.alarm.processes import Condition
from polyshard.alarm.reports import Cause
from polyshard.alarm.watch import SILENCE_SECONDS
from polyshard.errors import PeerError


def tell(error: BaseException) -> None:
    """Have ranks that wait for this one in a transfer know that it will not come."""
    alarm = current_alarm()
    if isinstance(error, PeerError) or alarm.board is None:
        return
    alarm.look()
    if alarm.report is None:
        alarm.fail("in an attempt", error)


def tell_again(error: BaseException) -> None:
    """As :func:`tell`, for those who began anew since: to them, what was told before is over."""
    alarm = current_alarm()
    if not isinstance(error, PeerError):
        alarm.begin_anew()
        tell(error)


def go_on() -> None:
    """What was told until now is over: all ranks know of it."""
    alarm = current_alarm()
    alarm.look()
    alarm.begin_anew()


@dataclass(frozen=True)
class Absent:
    """Why ranks will not come, by rank; and whether that is for good."""

    said: dict[int, str]
    is_final: bool


@dataclass
class Roll:
    """Which of ``ranks`` are still there, for a rank that asks now and then while it waits."""

    ranks: Sequence[int]
    _pulses: dict[int, tuple[int, float]] = field(default_factory=dict)

    def call(self) -> Absent | None:
        """Those that will not come, and have all others hear of it; ``None`` if all may."""
        alarm = current_alarm()
        if alarm.board is None:
            return None
        alarm.look()
        alarm.look_at_processes(tuple(self.ranks))
        said = {r: text for r in self.ranks if (text := self._gone(alarm, r)) is not None}
        if said:
            return Absent(said, is_final=True)
        report = alarm.report
        if report is not None and report.cause is Cause.STOPPED and report.rank in self.ranks:
            return Absent({report.rank: report.text}, is_final=False)
        return None

    def _gone(self, alarm: Alarm, rank: int) -> str | None:
        if rank == alarm.rank:
            return None
        if rank in alarm.gone:
            return alarm.gone[rank].text
        process = alarm.register.process_of(rank)
        condition = None if process is None else process.condition()
        if condition is Condition.GONE:
            return f"rank {rank} is gone: {process} was killed, or ended without a word"
        if condition is Condition.ELSEWHERE and self._is_silent(alarm, rank):
            return f"rank {rank} ({process}) has not been heard of for {SILENCE_SECONDS:.0f} s"
        return None

    def _is_silent(self, alarm: Alarm, rank: int) -> bool:
        """Whether the pulse of a rank on another host has stood still since this one listens."""
        try:
            number = alarm.register.pulse_of(rank)
        except UnansweredError:
            return False
        now = time.monotonic()
        before, since = self._pulses.get(rank, (number, now))
        self._pulses[rank] = (number, since if number == before else now)
        return now - self._pulses[rank][1] > SILENCE_SECONDS
