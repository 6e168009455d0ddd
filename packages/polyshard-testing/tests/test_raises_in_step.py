"""Errors that every rank meets: a rank raises its own, or quotes the one of another rank."""

from __future__ import annotations

import pytest

from polyshard.errors import PeerError
from polyshard_testing import raises_in_step


class LimitError(ValueError):
    """What the tests expect."""


class LowerLimitError(LimitError):
    """A kind of it."""


@pytest.mark.parametrize(
    "error",
    [
        LimitError("the limit is 3"),
        LowerLimitError("the limit is 3"),
        PeerError("rank 1 failed: LimitError: the limit is 3"),
        PeerError("rank 1 failed: LowerLimitError: the limit is 3"),
    ],
)
def test_the_own_error_and_one_that_is_quoted_pass(error: Exception) -> None:
    with raises_in_step(LimitError, "limit is 3"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        PeerError("rank 1 failed: KeyError: the limit is 3"),
        PeerError("rank 1 failed: LimitError: the limit is 4"),
        LimitError("the limit is 4"),
    ],
)
def test_others_do_not(error: Exception) -> None:
    with pytest.raises(AssertionError), raises_in_step(LimitError, "limit is 3"):
        raise error


def test_another_kind_of_error_passes_through() -> None:
    with pytest.raises(KeyError), raises_in_step(LimitError, "limit is 3"):
        raise KeyError("the limit is 3")
