"""What the thread that watches takes for ranks that wait for each other in vain."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from polyshard.alarm.alarm import Alarm
from polyshard.alarm.board import Board
from polyshard.alarm.positions import Position
from polyshard.alarm.reports import NOBODY, Cause, Report
from polyshard.alarm.watch import Watch

pytestmark = pytest.mark.once

KEY = "wire:1"
SECONDS = 2.0
"""To look, far more than it takes."""


def is_rung(alarm: Alarm) -> bool:
    return alarm.report is not None


class Waits:
    """A transfer with rank 1 that does not end."""

    def peers(self) -> tuple[int, ...]:
        return (1,)

    def place(self) -> tuple[int, str, int]:
        return 1, KEY, 1

    def posted(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("said_in", [0, 1])
def test_a_circle_of_an_earlier_epoch_is_over(said_in: int) -> None:
    store = dist.HashStore()
    alarm = Alarm(Board(store, "alarm", 0, (0, 1)))
    watch = Watch(alarm)
    alarm.start()
    alarm.ring(Report(1, Cause.RAISED, "rank 1 failed"))
    alarm.begin_anew()
    assert alarm.epoch == 1
    alarm.waiting = Waits()
    watch.start()
    try:
        end = time.monotonic() + SECONDS
        beat = 0
        while time.monotonic() < end and alarm.report is None:
            beat += 1
            other = Position(1, beat, 0, "wire:2", 1, {}, "is elsewhere", said_in)
            store.set("alarm/at/1", other.encode())
            time.sleep(0.05)
    finally:
        watch.close(SECONDS)
        alarm.courier.close(SECONDS)
    found = alarm.report
    assert (found is not None) == (said_in == 1)
    assert found is None or found.cause is Cause.APART


def test_what_was_seen_in_an_epoch_that_is_over_ends_no_other() -> None:
    alarm = Alarm(Board(dist.HashStore(), "alarm", 0, (0, 1)))
    alarm.start()
    alarm.ring(Report(1, Cause.RAISED, "rank 1 failed"))
    alarm.begin_anew()
    alarm.ring(Report(NOBODY, Cause.APART, "control flow differs"), 0)
    assert not is_rung(alarm)
    alarm.ring(Report(NOBODY, Cause.APART, "control flow differs"), 1)
    assert is_rung(alarm)
    alarm.courier.close(SECONDS)
