"""What the thread that watches takes for ranks that wait for each other in vain."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from toy_waits import WaitsFor

from polyshard.agreement.board import Board
from polyshard_resilience.alarm import watch
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.positions import Position
from polyshard_resilience.alarm.reports import NOBODY, Cause, Report
from polyshard_resilience.alarm.watch import Watch

SECONDS = 2.0
"""To look, far more than it takes; where something is to come about, PATIENT_SECONDS."""
PATIENT_SECONDS = 30.0
SILENT_SECONDS = 4.0
"""After which a store that does not answer is given up here."""


def is_rung(alarm: Alarm) -> bool:
    return alarm.report is not None


@pytest.mark.parametrize("said_in", [0, 1])
def test_a_circle_of_an_earlier_epoch_is_over(said_in: int) -> None:
    store = dist.HashStore()
    alarm = Alarm(Board(store, "alarm", 0, (0, 1)))
    watch = Watch(alarm)
    alarm.start()
    alarm.ring(Report(1, Cause.RAISED, "rank 1 failed"))
    alarm.begin_anew()
    assert alarm.epoch == 1
    alarm.waiting = WaitsFor(1)
    watch.start()
    try:
        end = time.monotonic() + (PATIENT_SECONDS if said_in == 1 else SECONDS)
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


class Pausing:
    """A store that does not answer while it is paused."""

    def __init__(self) -> None:
        self.inner = dist.HashStore()
        self.runs = threading.Event()
        self.runs.set()

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            assert self.runs.wait(60)
            return getattr(self.inner, name)(*args)

        return request


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pausing, Alarm]]:
    """A rank that waits in a transfer, whose store may pause."""
    monkeypatch.setattr("polyshard_resilience.alarm.watch.SILENCE_SECONDS", SILENT_SECONDS)
    store: Any = Pausing()
    alarm, peer = (Alarm(Board(store, "alarm", rank, (0, 1))) for rank in (0, 1))
    watch = Watch(alarm)
    alarm.start()
    peer.start()
    alarm.waiting = WaitsFor(1)
    watch.start()
    yield store, alarm
    store.runs.set()
    watch.close(SECONDS)
    for each in (alarm, peer):
        each.courier.close(SECONDS)


def test_pauses_of_the_store_do_not_add_up(watched: tuple[Pausing, Alarm]) -> None:
    store, alarm = watched
    for _ in range(4):
        time.sleep(0.6)
        store.runs.clear()
        time.sleep(0.3 * SILENT_SECONDS)
        store.runs.set()
    assert alarm.report is None


def test_a_store_that_stays_silent_is_given_up(watched: tuple[Pausing, Alarm]) -> None:
    store, alarm = watched
    store.runs.clear()
    end = time.monotonic() + PATIENT_SECONDS
    while alarm.report is None and time.monotonic() < end:
        time.sleep(0.05)
    assert alarm.report is not None
    assert "the store of the process group has not answered rank 0 for 4 s" in alarm.report.text


STANDS_IN_TORCH = """
def destroy(group, ended):
    ended.wait()
"""


class OfNobody(dist.ProcessGroup):
    """Torch's registry does not know it, like one that is being destroyed."""


def test_a_group_that_is_being_destroyed_does_not_end_the_watch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The main thread is in ``destroy_process_group()``, then in a transfer for good."""
    store = dist.HashStore()
    alarm = Alarm(Board(store, "alarm", 0, (0, 1)))
    alarm.start()
    made: dict[str, Any] = {}
    exec(compile(STANDS_IN_TORCH, distributed_c10d.__file__, "exec"), made)
    ended = threading.Event()
    watch = Watch(alarm)
    watch.start()
    threading.Timer(0.3, ended.set).start()
    made["destroy"](OfNobody(0, 1), ended)  # type: ignore[call-arg]
    alarm.waiting = WaitsFor(1)
    try:
        end = time.monotonic() + PATIENT_SECONDS
        beat = 0
        while time.monotonic() < end and not is_rung(alarm):
            beat += 1
            other = Position(1, beat, 0, "wire:2", 1, {}, "is elsewhere")
            store.set("alarm/at/1", other.encode())
            time.sleep(0.05)
    finally:
        watch.close(SECONDS)
        alarm.courier.close(SECONDS)
    assert is_rung(alarm)
    assert not caplog.records


def test_frames_of_a_thread_that_runs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for only where it has used no processor time since the last look."""
    asked: list[int] = []
    frames = sys._current_frames

    def asked_for() -> dict[int, Any]:
        asked.append(1)
        return dict(frames())

    monkeypatch.setattr(watch, "COLLECTIVES", frozenset({__file__}))
    monkeypatch.setattr(sys, "_current_frames", asked_for)
    thread = watch._Thread()
    found: list[object] = []

    def look_at_a_runner() -> None:
        for _ in range(4):
            found.append(thread.elsewhere((0, 1)))
            while time.clock_gettime(thread._clock) == thread._used:  # others use the processor
                time.sleep(0.01)

    def compute(group: object = None) -> None:
        del group
        looks = threading.Thread(target=look_at_a_runner)
        looks.start()
        while looks.is_alive():
            sum(range(1000))

    def look_at_a_waiter() -> None:
        end = time.monotonic() + 30.0
        while found[-1] is None and time.monotonic() < end:
            time.sleep(0.01)
            found.append(thread.elsewhere((0, 1)))

    def wait(group: object = None) -> None:
        looks = threading.Thread(target=look_at_a_waiter)
        looks.start()
        looks.join()
        assert group is None

    compute()
    assert found == [None] * 4
    assert not asked
    assert thread.is_in_torch()
    wait()
    assert found[-1] == watch._Elsewhere((0, 1))


NATIVE = """
import ctypes, sys, threading, time
from polyshard_resilience.alarm.watch import _Thread

libc = ctypes.CDLL(None)
nothing = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda argument: None)
main = _Thread()

def look():
    while True:
        main.is_in_torch()

threading.Thread(target=look, daemon=True).start()
sys.setswitchinterval(1e-4)
end = time.monotonic() + 4
while time.monotonic() < end:
    threads = (ctypes.c_ulong * 64)()
    for i in range(64):
        assert libc.pthread_create(ctypes.byref(threads, 8 * i), None, nothing, None) == 0
    for thread in threads:
        libc.pthread_join(ctypes.c_ulong(thread), None)
"""


def test_native_threads_may_enter_python_meanwhile() -> None:
    """As gloo's do to give memory back: the list of threads is never read without its lock."""
    command = [sys.executable, "-X", "faulthandler", "-c", NATIVE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
