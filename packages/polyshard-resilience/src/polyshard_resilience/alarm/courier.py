"""Requests to the store from a thread of its own, so that no caller waits for one that hangs.

The store lives in a process of its own (torchrun's agent) or in one of the ranks, which may be
stopped: then a request is not refused, it is never answered.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from polyshard.agreement.board import look

ANSWER_SECONDS = 0.5
"""How long a rank that failed, was let down, or looks at others waits for the store."""

T = TypeVar("T")
Request = Callable[[dist.Store], T]


class UnansweredError(RuntimeError):
    """The store did not answer in time, or is gone."""


@dataclass
class _Asked:
    request: Request[Any]
    done: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: Exception | None = None

    def run(self, store: dist.Store) -> None:
        try:
            self.answer = self.request(store)
        except Exception as error:  # whatever a store that is gone raises
            self.error = error
        self.done.set()


class Courier:
    """Makes requests one after the other; between them, one of its own again and again."""

    def __init__(self, store: dist.Store, routine: Request[None], seconds: float) -> None:
        """Make ``routine`` every ``seconds`` once started, until it raises."""
        self._store = store
        self._routine = routine
        self._seconds = seconds
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._begun: float | None = None
        """When the request began that has no answer yet."""
        self._thread = threading.Thread(target=self._run, name="polyshard-courier", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def silence(self, now: float) -> float:
        """Seconds that the store has not answered for; for good where it is gone."""
        begun = self._begun
        return 0.0 if begun is None else now - begun

    def ask(self, request: Request[T], seconds: float) -> T:
        """What the store answers.

        Raises:
            UnansweredError: when it does not within ``seconds``.
        """
        asked = self.tell(request)
        if not asked.done.wait(seconds):
            raise UnansweredError(f"the store did not answer within {seconds} s")
        if asked.error is not None:
            raise UnansweredError(f"the store is gone: {asked.error}") from asked.error
        answer: T = asked.answer
        return answer

    def look(self, key: str) -> str | None:
        """What is under ``key``, if there is anything, and the store answers soon."""
        with suppress(UnansweredError):
            return self.ask(lambda store: look(store, key), ANSWER_SECONDS)
        return None

    def tell(self, request: Request[Any]) -> _Asked:
        """Have ``request`` made without waiting for it."""
        asked = _Asked(request)
        self._asked.put(asked)
        return asked

    def close(self, seconds: float) -> None:
        """Make what was asked, and end; a request that hangs is left behind after ``seconds``."""
        self._asked.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        is_there = True
        while True:
            try:
                asked = self._asked.get(timeout=self._seconds)
            except queue.Empty:
                is_there = is_there and self._visited()
                continue
            if asked is None:
                return
            begun, self._begun = self._begun, self._begun or time.monotonic()
            asked.run(self._store)
            self._begun = begun

    def _visited(self) -> bool:
        self._begun = time.monotonic()
        try:
            self._routine(self._store)
        except Exception:  # the store is gone: no rank will write to it either
            return False
        self._begun = None
        return True
