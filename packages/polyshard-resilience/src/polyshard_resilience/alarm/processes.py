"""What becomes of the other processes of this host: the kernel knows, and need not be asked twice.

On Linux ``/proc`` tells a process that was stopped from one that is busy, and one that is gone from
another that has its number now. Elsewhere only whether there is such a process.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_STATE, _STARTED = 0, 19
"""Fields of ``/proc/PID/stat`` after the name in parentheses (proc(5), 3 and 22)."""


class Condition(Enum):
    """Of a process, as far as this one can see."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    ELSEWHERE = "on another host"


@dataclass(frozen=True)
class Process:
    """One rank's process. ``started`` is its start in clock ticks since boot, 0 if unknown."""

    host: str
    name: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Process:
        """This one."""
        return cls(_host(), socket.gethostname(), os.getpid(), _stat(os.getpid())[1])

    @classmethod
    def decode(cls, text: str) -> Process:
        """From what :meth:`encode` returned."""
        return cls(**json.loads(text))

    def encode(self) -> str:
        """As text for other ranks."""
        return json.dumps(asdict(self))

    @property
    def is_near(self) -> bool:
        """Whether it runs on this host, under numbers that mean the same here."""
        return self.host == _host()

    def condition(self) -> Condition:
        """What it is doing."""
        if not self.is_near:
            return Condition.ELSEWHERE
        if not _BOOT.exists():
            return _signalled(self.pid)
        state, started = _stat(self.pid)
        if state in ("", "Z", "X") or started != self.started:
            return Condition.GONE
        # "t" is a process that a debugger holds: its user wants others to wait.
        return Condition.STOPPED if state == "T" else Condition.RUNNING

    def __str__(self) -> str:
        """For an error."""
        return f"process {self.pid} on {self.name}"


def _host() -> str:
    """Equal for processes that see each other's numbers."""
    if not _BOOT.exists():
        return socket.gethostname()
    return f"{_BOOT.read_text().strip()} {_NAMESPACE.stat().st_ino}"


def _stat(pid: int) -> tuple[str, int]:
    """State and start of a process; an empty state if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[_STATE], int(fields[_STARTED])


def _signalled(pid: int) -> Condition:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Condition.GONE
    except PermissionError:
        pass
    return Condition.RUNNING
