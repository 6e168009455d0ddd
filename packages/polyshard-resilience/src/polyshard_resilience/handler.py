"""What the engine tells of the parts of a step, and what ranks make of it. See [Note: alarm].

[Note: let down elsewhere]
A model may communicate by itself (tensor parallelism does), and what it then raises when another
rank fails is gloo's word about a connection. From a forward, which ends in a call of ours, it comes
as the error that says why, if the model's results have been waited for: so they are. From a
backward it comes as it is, with that as a note: it is on its way through C++, so the frame that
called autograd is traced until it gets there.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import torch.distributed as dist
from typing_extensions import override

from polyshard.agreement.board import REQUESTS_PER_SECOND, open_board
from polyshard.errors import (
    ConnectionLostError,
    GradientMismatchError,
    LifecycleError,
    PeerError,
    PolyshardError,
)
from polyshard.failures import Ended, FailureHandler, Kind, Part, failure_handler, handle_failures
from polyshard_resilience._torch_private import await_devices, is_from_backend
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.current import current_alarm
from polyshard_resilience.alarm.peers import gathering
from polyshard_resilience.alarm.reports import Cause, Report
from polyshard_resilience.device import DeviceSteps
from polyshard_resilience.mending import mend_groups
from polyshard_resilience.wire import WatchedWire

PATIENCE_SECONDS = 0.3
"""How long a rank that waits at the store waits before it looks at processes."""
LOOK_SECONDS = 0.1
"""How often it does."""
QUOTE_SECONDS = 5.0
"""How long others wait for the exception of a backward; far longer than it takes."""
MAY_QUOTE_SECONDS = 0.3
"""The same where only a reset may quote it: autograd was called from no Python frame at hand."""


def enable() -> None:
    """Tell all ranks within a second which rank failed, where and why, from now on.

    Call it on every rank before ``fully_shard``; ranks compare that they did. It takes a thread
    and, over gloo, connections of its own. Calling it again changes nothing.

    Raises:
        LifecycleError: after something was sharded.
    """
    handle_failures(current_handler)


def current_handler() -> FailureHandler:
    """That of the default process group; core's where there is no other rank to tell."""
    return _handler_of(current_alarm())


def check_enabled(ranks: Sequence[int], what: str) -> None:
    """Refuse ``what`` among ``ranks`` that would not tell each other of failures.

    Raises:
        LifecycleError: without :func:`enable`.
    """
    is_shared = len(ranks) > 1 and open_board(ranks) is not None
    if is_shared and not isinstance(failure_handler(), AlarmHandler):
        raise LifecycleError(
            f"{what} needs ranks that report failures to each other. Call "
            "polyshard_resilience.enable() on every rank before fully_shard."
        )


def refusal_of(error: RuntimeError) -> PolyshardError | None:
    """What to raise instead of ``error``, where another rank's failure explains it."""
    handler = failure_handler()
    return handler.refusal_of(error) if isinstance(handler, AlarmHandler) else None


@functools.lru_cache(maxsize=1)
def _handler_of(alarm: Alarm) -> FailureHandler:
    return FailureHandler() if alarm.board is None else AlarmHandler(alarm)


class AlarmHandler(FailureHandler):
    """Has an alarm ring for failures of this rank, and explains its errors by those of others."""

    name = "polyshard-resilience"

    def __init__(self, alarm: Alarm) -> None:
        """``alarm`` has ranks to tell."""
        self.alarm = alarm
        self._device_steps = DeviceSteps(alarm)

    @override
    def begin_step(self) -> int:
        self.alarm.begin_turn()
        return self.alarm.epoch

    @override
    def begin(self, part: Part) -> None:
        alarm = self.alarm
        alarm.doing = part.place
        alarm.parts += 1
        if alarm.report is not None:
            alarm.check(part)

    @override
    def explain(
        self, part: Part, error: BaseException | None, caller: FrameType | None = None
    ) -> None:
        if part.kind is Kind.TRANSFER:
            self._transfer_failed(part, error)
        elif part.kind is Kind.FORWARD:
            self._forward_failed(str(part), error)
        elif part.kind is Kind.BACKWARD:
            self._backward_failed(str(part), error, caller)
        elif isinstance(error, RuntimeError):
            refusal = self.refusal_of(error)
            if refusal is not None:
                raise refusal from error

    def _transfer_failed(self, part: Part, error: BaseException | None) -> None:
        alarm = self.alarm
        if error is None or isinstance(error, PeerError):
            return
        if isinstance(error, ConnectionLostError):
            alarm.explain(error.peer, error)
            raise alarm.refusal(part) from error
        # Only what a transfer raises can be another rank's fault; the rest is this rank's own.
        let_down = isinstance(error, RuntimeError) and not isinstance(error, PolyshardError)
        alarm.look()
        if let_down and alarm.report is not None and alarm.report.rank != alarm.rank:
            raise alarm.refusal(part) from error
        alarm.fail(f"in group '{part}'", error)

    def _forward_failed(self, unit: str, error: BaseException | None) -> None:
        """An exception passes through the outermost forward, which was in ``unit``, if in any."""
        alarm = self.alarm
        if error is None or isinstance(error, PeerError):
            alarm.see()
            return
        alarm.look()
        if alarm.report is None and isinstance(error, RuntimeError) and is_from_backend(error):
            alarm.explain(None, error)
        if alarm.report is None:
            alarm.fail(f"in the forward of '{unit}'" if unit else "in forward", error)
        elif alarm.report.rank != alarm.rank:
            error.add_note(f"The step was lost before: {alarm.report.text}")
        alarm.see()

    def _backward_failed(
        self, unit: str, error: BaseException | None, caller: FrameType | None
    ) -> None:
        """An exception ended a backward, which had last reached ``unit``."""
        alarm = self.alarm
        if isinstance(error, PeerError):
            alarm.see()
        elif alarm.report is None and error is not None:
            alarm.fail("at the end of its backward", error)
        else:
            alarm.look()
            if alarm.report is None and alarm.board is not None:
                alarm.look_at_processes(alarm.expected(alarm.board.ranks))
            if alarm.report is None:
                text = f"rank {alarm.rank} failed in its backward, when it had reached '{unit}'"
                will_quote = _can_ask(caller) or sys.exc_info()[1]  # which a reset quotes
                seconds = QUOTE_SECONDS if will_quote else MAY_QUOTE_SECONDS
                alarm.ring(Report(alarm.rank, Cause.RAISED, text, seconds))
            _Quote(alarm).expect(caller)
        alarm.see()

    def refusal_of(self, error: RuntimeError) -> PolyshardError | None:
        """What to raise instead of what a call raised. See [Note: let down elsewhere]."""
        alarm = self.alarm
        if not is_from_backend(error) or isinstance(error, PolyshardError):
            return None
        if alarm.explain(None, error).rank == alarm.rank:
            return None
        return alarm.because("a collective of the model did not complete")

    @override
    def end_step(self, ended: Iterator[Ended], forwards: Iterable[str]) -> None:
        self._device_steps.end(ended, forwards)

    @override
    @contextmanager
    def reset(self, error: BaseException | None, *, is_in_mid_step: bool) -> Iterator[None]:
        alarm = self.alarm
        alarm.look()
        if alarm.report is None and is_in_mid_step:
            mistake = LifecycleError("reset_iter_state() was called in mid-step")
            alarm.fail("and gave its step up", error or mistake)
        elif error is not None:
            alarm.add_detail(error)
        alarm.see()
        if alarm.report is not None:
            await_devices()  # memory that goes back is used by nothing that was aborted
        yield
        alarm.begin_anew()

    @override
    def renew(self) -> None:
        mend_groups(self.alarm)

    @override
    @contextmanager
    def waiting(
        self, ranks: Sequence[int], key: str, count: int, what: str
    ) -> Iterator[Callable[[], str | None]]:
        with gathering(ranks, key, count, what):
            yield _InVain(self.alarm, ranks, what)

    @override
    def wire(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> WatchedWire:
        known = self.alarm.connections
        if ranks not in known:
            known.setdefault(ranks, WatchedWire(group, self.alarm, ranks))
        return cast("WatchedWire", known[ranks])


class _InVain:
    """Says why ranks will not come to where this one waits, if that is known."""

    def __init__(self, alarm: Alarm, ranks: Sequence[int], what: str) -> None:
        """The wait begins."""
        self._alarm, self._ranks, self._what = alarm, ranks, what
        self._rung = alarm.report
        self._look_at = time.monotonic() + PATIENCE_SECONDS

    def __call__(self) -> str | None:
        alarm, report = self._alarm, self._alarm.report
        is_over = report is not None and (report.is_of_process or report.cause is Cause.APART)
        if is_over and report is not self._rung:
            return str(alarm.because(f"{self._what} cannot begin"))
        now = time.monotonic()
        if now >= self._look_at:
            seconds = 4 * len(self._ranks) / REQUESTS_PER_SECOND
            self._look_at = now + max(LOOK_SECONDS, seconds)
            alarm.look_at_processes(self._ranks)
        return None


def _can_ask(frame: FrameType | None) -> bool:
    """Whether ``frame`` can tell of an exception; a debugger, which sees it itself, is left."""
    return frame is not None and sys.gettrace() is None


class _Quote:
    """Adds the exception to the report, or the report to the exception.

    See [Note: let down elsewhere].
    """

    def __init__(self, alarm: Alarm) -> None:
        """Nothing is traced before :meth:`expect`."""
        self._alarm = alarm

    def expect(self, frame: FrameType | None) -> None:
        """Have ``frame``, which called autograd, tell when the exception gets there."""
        if frame is not None and _can_ask(frame):
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
