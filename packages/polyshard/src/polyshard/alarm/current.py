"""The alarm of this process: that of the process group that is the default one now."""

from __future__ import annotations

import functools
import threading

import torch.distributed as dist

from polyshard._torch.private import default_store
from polyshard.alarm.alarm import Alarm
from polyshard.alarm.board import Board, open_board
from polyshard.alarm.process_end import ProcessEnd
from polyshard.alarm.watch import Watch


class Current:
    """Makes an alarm for every default process group that comes."""

    def __init__(self) -> None:
        """There is none yet."""
        self._store: dist.Store | None = None
        self._alarm = Alarm(None)
        self._end: ProcessEnd | None = None
        self._lock = threading.Lock()

    def get(self) -> Alarm:
        """That of the default process group; a silent one where there is nobody to tell."""
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
