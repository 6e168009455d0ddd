"""Errors that tests expect: of a call that is refused, and of a step that fails on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyshard.errors import PeerError, PolyshardError


def refused(
    error: type[Exception], pattern: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    with pytest.raises(error, match=pattern) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, PolyshardError)
    assert isinstance(caught.value, (ValueError, TypeError, RuntimeError))


def raises_in_step(error: type[Exception], pattern: str) -> pytest.RaisesExc[Exception]:
    """``pytest.raises`` for an error that every rank meets in a step of its own accord.

    A rank that is slower hears first of the rank that has failed, and rightly raises a
    ``PeerError``, which quotes that rank's error.
    """
    return pytest.raises((error, PeerError), match=pattern)
