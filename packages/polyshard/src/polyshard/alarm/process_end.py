"""What is rung when the process of a rank ends: an exception nobody caught, or an early exit."""

from __future__ import annotations

import atexit
import sys
from types import TracebackType

from polyshard.alarm.alarm import Alarm
from polyshard.alarm.board import said_of
from polyshard.alarm.watch import Watch

CLOSE_SECONDS = 1.0
"""How long the end of a process may take to tell others."""


class ProcessEnd:
    """Rings for one alarm's rank when its process ends, and ends the threads."""

    def __init__(self, alarm: Alarm, watch: Watch) -> None:
        """Nothing is hooked before :meth:`attach`."""
        self._alarm = alarm
        self._watch = watch
        self._before = sys.excepthook
        self._how = ""

    def attach(self) -> None:
        """See the end of the interpreter, and the exception that causes it."""
        self._before = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._exit)

    def detach(self) -> None:
        """The process group is another one now."""
        atexit.unregister(self._exit)
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._before
        self._close(0.0)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._how = f" after {said_of(error)}"
        alarm = self._alarm
        if alarm.turns and alarm.report is None:
            ends = not (sys.flags.interactive or hasattr(sys, "ps1"))
            alarm.fail("with an exception that nobody caught", error, ends=ends)
        else:
            alarm.add_detail(error)
        self._before(kind, error, trace)

    def _exit(self) -> None:
        turns = self._alarm.turns
        self._alarm.register.leave(f"its process exited after {turns} forwards{self._how}")
        self._close(CLOSE_SECONDS)

    def _close(self, seconds: float) -> None:
        self._watch.close(seconds)
        self._alarm.courier.close(seconds)
