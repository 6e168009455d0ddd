"""What can be seen of another process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from polyshard_resilience.alarm.processes import Condition, Process, _stat

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what /proc tells, on Linux")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield made
    made.kill()
    made.wait()


def process_of(child: subprocess.Popen[bytes]) -> Process:
    return replace(Process.own(), pid=child.pid, started=_stat(child.pid)[1])


def comes_to(process: Process, condition: Condition) -> bool:
    for _ in range(500):
        if process.condition() is condition:
            return True
        time.sleep(0.01)
    return False


def test_a_process_that_is_stopped_goes_on_and_is_killed(child: subprocess.Popen[bytes]) -> None:
    process = process_of(child)
    assert process.condition() is Condition.RUNNING
    child.send_signal(signal.SIGSTOP)
    assert comes_to(process, Condition.STOPPED)
    child.send_signal(signal.SIGCONT)
    assert comes_to(process, Condition.RUNNING)
    child.kill()
    assert comes_to(process, Condition.GONE)  # before anybody has asked how it ended
    child.wait()
    assert process.condition() is Condition.GONE


def test_another_process_with_its_number(child: subprocess.Popen[bytes]) -> None:
    earlier = replace(process_of(child), started=1)
    assert earlier.condition() is Condition.GONE


def test_on_another_host() -> None:
    assert replace(Process.own(), host="other").condition() is Condition.ELSEWHERE


def test_as_text() -> None:
    own = Process.own()
    assert Process.decode(own.encode()) == own
    assert str(own.pid) in str(own)
