"""A rank that is known to be gone is news only to a rank that waits for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from toy_waits import WaitsFor

from polyshard.agreement.board import Board
from polyshard_resilience.alarm import peers, watch
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.peers import Roll
from polyshard_resilience.alarm.processes import Process, _stat
from polyshard_resilience.alarm.reports import Cause, Report, unexplained
from polyshard_resilience.alarm.watch import Watch
from polyshard_resilience.handler import AlarmHandler

GONE = 2
SECONDS = 1.0
"""To look, three times as long as a watch is patient; PATIENT_SECONDS for it to find something."""
PATIENT_SECONDS = 30.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what /proc tells, on Linux")


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    """That of rank 0 of three, which continues after rank 2 was killed."""
    store = dist.HashStore()
    board = Board(store, "alarm", 0, (0, 1, 2))
    made = Alarm(board)
    made.start()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        process = replace(Process.own(), pid=child.pid, started=_stat(child.pid)[1])
        entries = f"1 {Process.own().encode()}\n{GONE} {process.encode()}\n"
        made.courier.ask(lambda at: at.append(made.register._host, entries), PATIENT_SECONDS)  # type: ignore[attr-defined]
        while GONE not in made.register.known:  # the store may be slow to answer
            made.register.read_host()
        made.look_at_processes((1, GONE))
        assert made.report is None
        child.kill()
    made.look_at_processes((1, GONE))
    assert is_rung_for(made, GONE)
    made.see()
    made.begin_anew()
    yield made
    made.courier.close(SECONDS)


def watched(alarm: Alarm, seconds: float) -> None:
    """Have a watch look until there is a report, for ``seconds`` at most."""
    looking = Watch(alarm)
    looking.start()
    end = time.monotonic() + seconds
    while alarm.report is None and time.monotonic() < end:
        time.sleep(0.02)
    looking.close(PATIENT_SECONDS)


def is_rung_for(alarm: Alarm, rank: int) -> bool:
    return alarm.report is not None and alarm.report.rank == rank


@pytest.mark.parametrize("rank", [1, GONE])
def test_a_wait_for_a_rank(alarm: Alarm, rank: int) -> None:
    alarm.waiting = WaitsFor(rank)
    watched(alarm, SECONDS if rank != GONE else PATIENT_SECONDS)
    assert (alarm.report is not None) == (rank == GONE)


def test_a_connection_to_a_rank_that_nobody_knows(alarm: Alarm) -> None:
    """It takes no rank away: those who recover wait for all the others."""
    before = dict(alarm.gone)
    alarm.ring(unexplained(None, RuntimeError("Connection closed by peer"), is_there=False))
    assert alarm.report is not None
    assert alarm.report.cause is Cause.GONE
    assert alarm.gone == before


def test_a_host_that_waits_for_its_device(alarm: Alarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "on_devices", lambda: {"sim"})
    watched(alarm, SECONDS)
    assert alarm.report is None


def test_a_store_that_is_slow(alarm: Alarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm.courier, "silence", lambda now: 1.0)
    monkeypatch.setattr(watch._Thread, "is_in_torch", lambda thread: True)
    watched(alarm, SECONDS)
    assert alarm.report is None


def test_a_call_of_the_roll(alarm: Alarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "current_alarm", lambda: alarm)
    assert Roll((0, 1)).call() is None
    absent = Roll((0, 1, GONE)).call()
    assert absent is not None
    assert absent.is_final
    assert absent.said.keys() == {GONE}
    assert alarm.report is None


def test_a_call_of_the_roll_that_could_tell_of_nothing_tells_later(
    alarm: Alarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch has one report: of a rank that dies after it, others are told in the next."""
    monkeypatch.setattr(peers, "current_alarm", lambda: alarm)
    alarm.gone.clear()
    alarm.told.clear()
    alarm.ring(Report(1, Cause.RAISED, "rank 1 failed"))
    for _ in range(2):
        absent = Roll((0, 1, GONE)).call()
        assert absent is not None
        assert absent.said.keys() == {GONE}
    assert alarm.report is not None
    assert alarm.report.rank == 1
    alarm.begin_anew()
    Roll((0, 1, GONE)).call()
    assert is_rung_for(alarm, GONE)


def test_a_backward_that_fails_by_itself(alarm: Alarm) -> None:
    handler: Any = AlarmHandler(alarm)
    handler._backward_failed("layer", None, None)
    assert alarm.report is not None
    assert alarm.report.text.startswith("rank 0 failed in its backward")


def test_a_rank_that_left_and_ended(alarm: Alarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is news only to a rank that waits for it, and to no other what has failed."""
    alarm.gone.clear()
    alarm.told.clear()
    alarm.away = frozenset({GONE})
    monkeypatch.setattr(watch, "on_devices", lambda: {"sim"})
    watched(alarm, SECONDS)
    assert alarm.report is None
    report = alarm.explain(None, RuntimeError("Connection closed by peer"))
    assert report.rank != GONE
    alarm.begin_anew()
    handler: Any = AlarmHandler(alarm)
    handler._backward_failed("layer", None, None)
    assert is_rung_for(alarm, alarm.rank)
    alarm.begin_anew()
    alarm.waiting = WaitsFor(GONE)
    watched(alarm, PATIENT_SECONDS)
    assert is_rung_for(alarm, GONE)
