"""What tells that a backward has ended, whichever holder lets go of it first."""

from __future__ import annotations

from types import FrameType

import pytest

from polyshard.engine.step import BackwardGuard


class Told:
    def __init__(self) -> None:
        self.ended = 0
        self.broke: list[Exception | None] = []

    def end(self) -> None:
        self.ended += 1

    def fails(self) -> None:
        raise ValueError("on purpose")

    def breaks(self, error: Exception | None, caller: FrameType | None) -> None:
        del caller
        self.broke.append(error)


def test_a_backward_that_ends_well() -> None:
    told = Told()
    guard = BackwardGuard(told.end, told.breaks)
    guard()
    guard.give_up()
    del guard
    assert (told.ended, told.broke) == (1, [])


def test_an_exception_is_told_once() -> None:
    told = Told()
    guard = BackwardGuard(told.end, told.breaks)
    del guard  # as autograd does
    assert (told.ended, told.broke) == (0, [None])


def test_a_reset_comes_before_autograd_lets_go() -> None:
    told = Told()
    guard = BackwardGuard(told.end, told.breaks)
    guard.give_up()
    guard.give_up()
    del guard
    assert (told.ended, told.broke) == (0, [None])


def test_what_the_end_raises_is_quoted() -> None:
    told = Told()
    guard = BackwardGuard(told.fails, told.breaks)
    with pytest.raises(ValueError, match="on purpose") as caught:
        guard()
    del guard
    assert told.broke == [caught.value]
