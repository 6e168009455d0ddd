"""Exceptions of the model itself: in its forward, and in its backward.

[Note: broken backwards]
Nobody is called when an exception ends a backward. But what is to be called when it ends well is
kept by autograd, and let go of when the backward is over either way. So a guard is kept there: if
it goes without having been called, an exception passed. Which one is not known at that moment: it
is on its way through C++. So the Python frame that called autograd is traced until it gets there.

[Note: let down elsewhere]
A model may communicate by itself (tensor parallelism does), and what it then raises when another
rank fails is gloo's word about a connection. From a forward, which ends in a call of ours, it comes
as the error that says why, if the model's results have been waited for: so they are. From a
backward it comes as it is, with that as a note.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from polyshard._torch.gloo import is_from_gloo
from polyshard.alarm.alarm import Alarm
from polyshard.alarm.current import current_alarm
from polyshard.alarm.reports import Cause, Report
from polyshard.errors import (
    GradientMismatchError,
    LifecycleError,
    PeerError,
    PolyshardError,
)

Broke = Callable[[Exception | None, FrameType | None], None]


class BackwardGuard:
    """Has ``end`` called when a backward ends well, and ``broke`` when not."""

    def __init__(self, end: Callable[[], None], broke: Broke) -> None:
        """To be queued as a callback, and kept nowhere else.

        ``broke`` is told the exception, if it is known.
        """
        self._end = end
        self._broke = broke
        self._is_over = False

    def __call__(self) -> None:
        """The backward ended well, as far as the model is concerned."""
        self._is_over = True
        try:
            self._end()
        except Exception as error:
            self._broke(error, None)
            raise

    def __del__(self) -> None:
        """See [Note: broken backwards]."""
        if not (self._is_over or sys.is_finalizing()):
            self._broke(None, sys._getframe().f_back)


def forward_broke(alarm: Alarm, names: Sequence[str]) -> None:
    """An exception passes through the outermost forward, which was in these units."""
    error = sys.exc_info()[1]
    if error is None or isinstance(error, PeerError):
        alarm.see()
        return
    alarm.look()
    if alarm.report is None and isinstance(error, RuntimeError) and is_from_gloo(error):
        alarm.explain(None, error)
    if alarm.report is None:
        alarm.fail(f"in the forward of '{names[-1]}'" if names else "in forward", error)
    elif alarm.report.rank != alarm.rank:
        error.add_note(f"The step was lost before: {alarm.report.text}")
    alarm.see()


def let_down(error: RuntimeError) -> PolyshardError | None:
    """What to raise in place of what a forward raised. See [Note: let down elsewhere]."""
    if not is_from_gloo(error) or isinstance(error, PolyshardError):
        return None
    alarm = current_alarm()
    if alarm.board is None or alarm.explain(None, error).rank == alarm.rank:
        return None
    return alarm.because("a collective of the model did not complete")


def backward_broke(
    alarm: Alarm, reached: str, error: Exception | None, caller: FrameType | None
) -> None:
    """An exception ended a backward, which had last reached this unit.

    ``error`` if it is known; else it is on its way to ``caller``.
    """
    if isinstance(error, PeerError):
        alarm.see()
    elif alarm.report is None and error is not None:
        alarm.fail("at the end of its backward", error)
    else:
        alarm.look()
        if alarm.report is None and alarm.board is not None:
            alarm.look_at_processes(alarm.board.ranks)
        if alarm.report is None:
            text = f"rank {alarm.rank} failed in its backward, when it had reached '{reached}'"
            alarm.ring(Report(alarm.rank, Cause.RAISED, text, is_whole=False))
        _Quote(alarm).expect(caller)
    alarm.see()


def given_up(alarm: Alarm, error: BaseException | None, *, is_in_mid_step: bool) -> None:
    """A step is given up, because of ``error`` if one is handled.

    Nobody is to wait for transfers of it, nor is this rank to wait for theirs.
    """
    alarm.look()
    if alarm.report is None and is_in_mid_step:
        mistake = LifecycleError("reset_iter_state() was called in mid-step")
        alarm.fail("and gave its step up", error or mistake)
    elif error is not None:
        alarm.add_detail(error)
    alarm.see()


class _Quote:
    """Adds the exception to the report, or the report to the exception.

    See [Note: broken backwards] and [Note: let down elsewhere].
    """

    def __init__(self, alarm: Alarm) -> None:
        """Nothing is traced before :meth:`expect`."""
        self._alarm = alarm

    def expect(self, frame: FrameType | None) -> None:
        """Have ``frame``, which called autograd, tell when the exception gets there."""
        if frame is not None and sys.gettrace() is None:  # a debugger sees it itself
            frame.f_trace = self._trace
            sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "exception":
            sys.settrace(None)
            frame.f_trace = None
            alarm, error = self._alarm, argument[1]
            if alarm.report is None or alarm.report.rank == alarm.rank:
                alarm.add_detail(error)
            elif not isinstance(error, (PeerError, GradientMismatchError)):
                error.add_note(str(alarm.because("the backward did not complete")))
