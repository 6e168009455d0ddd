"""``pytest --late-rank=N``: rank N is late wherever a test expects an exception.

Where every rank fails of its own accord, a rank that is slower learns of another's failure first,
and raises ``PeerError`` instead of its own error: there, or still in the backward before, which
its peers have left. Which rank that is depends on the machine's load; here it is chosen. A test
that passes with each rank late does not rely on time.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

VARIABLE = "POLYSHARD_LATE_RANK"
"""How the option reaches ranks, which are processes of their own."""
_LATE_SECONDS = 0.3  # the alarm's thread looks for other ranks' failures ten times a second


def become_late() -> None:
    """Be late from now on: within every ``pytest.raises``, and at the end of every backward.

    Within ``raises`` that is at its begin and where failures pass: the places at which the engine
    looks whether another rank has failed, and tells of a failure of its own.
    """
    import pytest

    from polyshard.engine.unit import RootContext
    from polyshard_resilience.alarm.alarm import Alarm
    from polyshard_resilience.handler import AlarmHandler

    depth = 0

    def expect(begin: Callable[..., Any], change: int) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            nonlocal depth
            depth += change
            if change > 0:
                time.sleep(_LATE_SECONDS)
            return begin(*args)

        return wrapper

    def delay(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if depth:
                time.sleep(_LATE_SECONDS)
            return function(*args, **kwargs)

        return wrapper

    def surround(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            time.sleep(_LATE_SECONDS)
            try:
                return function(*args)
            finally:
                time.sleep(_LATE_SECONDS)

        return wrapper

    for owner, name, made in (
        (pytest.RaisesExc, "__enter__", expect(pytest.RaisesExc.__enter__, 1)),
        (pytest.RaisesExc, "__exit__", expect(pytest.RaisesExc.__exit__, -1)),
        (AlarmHandler, "begin", delay(AlarmHandler.begin)),
        (Alarm, "fail", delay(Alarm.fail)),
        (RootContext, "end_backward", surround(RootContext.end_backward)),
    ):
        setattr(owner, name, made)


def is_late(rank: int) -> bool:
    """Whether the environment of this process says so of ``rank``."""
    return os.environ.get(VARIABLE) == str(rank)


def expects_errors(function: Callable[..., Any]) -> bool:
    """Whether ``function``, or a function of tests that it names, names ``raises`` and the like."""
    seen: set[FunctionType] = set()

    def names_it(found: object) -> bool:
        found = inspect.unwrap(found) if callable(found) else found
        if not isinstance(found, FunctionType) or found in seen:
            return False
        seen.add(found)
        if not {"tests", "integration_tests"}.intersection(Path(found.__code__.co_filename).parts):
            return False
        names = _names(found.__code__)
        if any(name.startswith(("raises", "refuse")) for name in names):
            return True
        return any(names_it(found.__globals__.get(name)) for name in names)

    return names_it(function)


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))
