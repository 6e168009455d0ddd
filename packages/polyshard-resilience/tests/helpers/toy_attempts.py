"""Attempts that are to fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyshard_resilience.errors import AttemptError


def failure(attempt: Any, block: Callable[[], object], pattern: str = "") -> AttemptError:
    """What an attempt raises whose body is ``block``, and which matches ``pattern``."""

    def run() -> None:
        with attempt:
            block()

    with pytest.raises(AttemptError, match=pattern) as caught:
        run()
    return caught.value


def raising(error: BaseException, *before: Callable[[], object]) -> Callable[..., None]:
    """What does ``before`` and raises ``error``, whatever it is called with."""

    def run(*args: object, **kwargs: object) -> None:
        for work in before:
            work()
        raise error

    return run
