"""Errors of calls that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyshard.errors import PolyshardError


def refused(
    error: type[Exception], pattern: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    with pytest.raises(error, match=pattern) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, PolyshardError)
    assert isinstance(caught.value, (ValueError, TypeError, RuntimeError))
