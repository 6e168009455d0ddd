"""The alarm of this process: that of the process group that is the default one now."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from types import TracebackType

import torch.distributed as dist

from polyshard._torch.private import default_store
from polyshard.agreement.board import Board, open_board, said_of
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.watch import Watch

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
            alarm.fail("with an uncaught exception", error, ends=ends)
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


class Current:
    """Makes an alarm for every default process group that comes."""

    def __init__(self) -> None:
        """There is none yet."""
        self._store: dist.Store | None = None
        self._alarm = Alarm(None)
        self._end: ProcessEnd | None = None
        self._lock = threading.Lock()

    def get(self) -> Alarm:
        """That of the default process group; a silent one where there are no other ranks."""
        store = default_store() if dist.is_initialized() else None
        if store is None or store is not self._store:
            with self._lock:
                self._replace(open_board(range(dist.get_world_size())) if store else None)
                self._store = store
        return self._alarm

    def _replace(self, board: Board | None) -> None:
        if self._end is not None:
            self._end.detach()
            self._end = None
        if board is None or len(board.ranks) == 1:
            self._alarm = Alarm(None)
            return
        self._alarm = Alarm(board.part("alarm"))
        watch = Watch(self._alarm)
        self._end = ProcessEnd(self._alarm, watch)
        self._end.attach()
        self._alarm.start()
        watch.start()


@functools.cache
def _current() -> Current:
    """One for the process: threads and hooks of the interpreter are the process' as well."""
    return Current()


def current_alarm() -> Alarm:
    """The alarm of the ranks of the default process group, ringing or not."""
    return _current().get()
