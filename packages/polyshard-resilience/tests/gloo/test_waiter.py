"""Waits for messages end when connections are cut, also for those that are half way through."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from toy_meeting import await_all

from polyshard.errors import ConnectionLostError
from polyshard.transport.gloo.messages import Message, Works
from polyshard.transport.gloo.wire import Job, wire_of
from polyshard_resilience.alarm.current import current_alarm
from polyshard_resilience.alarm.reports import Cause, Report
from polyshard_resilience.wire import Waiter
from polyshard_testing import ranks

PATIENT_SECONDS = 10.0
"""Far below the time-out of the process group (60 s)."""
ELEMENTS = 64 << 20
"""Of a message that is on its way for a while (bytes)."""


class Stuck:
    """A work that gloo forgot."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def wait(self) -> bool:
        return self.end.wait()


class Fails:
    def wait(self) -> bool:
        raise RuntimeError("Connection closed by peer")


def test_a_wait_that_never_ends_is_left_behind() -> None:
    waiter, stuck, over = Waiter(), Stuck(), threading.Event()
    threading.Timer(0.2, over.set).start()
    works: Any = [stuck]
    left = Job(works, None)
    with pytest.raises(ConnectionLostError, match="cut"):
        waiter.wait(left, over.is_set)
    assert left.is_left
    late: Any = [Stuck()]
    late[0].end.set()
    waiter.wait(Job(late, None), over.is_set)  # by another thread
    stuck.end.set()


class InterruptedWaitError(Exception):
    """What a handler of a signal raises."""


def test_a_wait_that_was_interrupted_is_left_behind() -> None:
    def interrupt() -> bool:
        raise InterruptedWaitError

    waiter, stuck, late = Waiter(), Stuck(), Stuck()
    works: Any = [stuck]
    left = Job(works, None)
    with pytest.raises(InterruptedWaitError):
        waiter.wait(left, interrupt)
    assert left.is_left
    late.end.set()
    others: Any = [late]
    waiter.wait(Job(others, None), threading.Event().is_set)  # by another thread
    stuck.end.set()


def test_the_thread_ends_with_its_waiter() -> None:
    def waiting() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "polyshard-wait"}

    before = waiting()
    waiter, done = Waiter(), Stuck()
    done.end.set()
    works: Any = [done]
    waiter.wait(Job(works, None), lambda: False)
    (thread,) = waiting() - before
    del waiter
    thread.join(PATIENT_SECONDS)
    assert not thread.is_alive()


def test_an_error_is_told_with_its_place() -> None:
    good = Stuck()
    good.end.set()
    works: Any = [good, Fails(), Stuck()]
    job = Job(works, None)
    with pytest.raises(RuntimeError, match="closed by peer"):
        Waiter().wait(job, lambda: False)
    assert job.at == 1


@ranks(2)
def test_messages_half_way_through(rank: int, size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    wire, alarm = wire_of(group), current_alarm()
    for turn in range(3):
        mine, theirs = torch.ones(ELEMENTS, dtype=torch.uint8), torch.empty(ELEMENTS).byte()
        works = Works(wire, 2 * turn)
        with suppress(ConnectionLostError):  # the other one may have cut already
            works.post("recv", [Message([theirs], 1 - rank)])
            works.post("send", [Message([mine], 1 - rank)])
        if rank == 0:
            time.sleep(0.002 * turn)
            alarm.ring(Report(0, Cause.RAISED, "rank 0 failed"))
        begin = time.monotonic()
        for _ in range(2):  # the one that is received, and the one that is sent
            with suppress(ConnectionLostError):
                works.wait()
        works.wait()  # nothing is left
        assert time.monotonic() - begin < PATIENT_SECONDS
        while alarm.report is None:
            alarm.look()
            time.sleep(0.01)
        alarm.see()  # as a rank that raises does
        dist.barrier()
        await_all("seen", size)  # the next turn's failure would end the barrier for a rank behind
        alarm.begin_anew()
