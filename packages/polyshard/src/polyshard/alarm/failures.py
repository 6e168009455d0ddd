"""A rank that fails during a step says why, and its peers quote it instead of gloo's words."""

from __future__ import annotations

from types import TracebackType

from typing_extensions import override

from polyshard.alarm.alarm import Alarm
from polyshard.alarm.current import current_alarm
from polyshard.errors import ConnectionLostError, PeerError, PolyshardError


class FailureReport:
    """Parts of a step whose exceptions are reported, or explained by those of other ranks.

    See [Note: alarm]. As a context manager it surrounds a block with :meth:`begin` and
    :meth:`explain`.
    """

    def __init__(self, group: object, place: object = None) -> None:
        """``group`` is asked for its name (``str(group)``) when there is something to say.

        So is ``place``, for ranks that ask where this one is.
        """
        self._group = group
        self._place = group if place is None else place
        self._alarm: Alarm | None = None

    @override
    def __str__(self) -> str:
        """The name of the group."""
        return str(self._group)

    def begin(self) -> None:
        """Refuse to begin in a step that is lost.

        Raises:
            PeerError: quoting the rank that failed first.
        """
        alarm = self._alarm
        if alarm is None:  # that of the process group in use: asking for it takes a moment
            alarm = self._alarm = current_alarm()
        alarm.doing = self._place
        if alarm.report is not None:
            alarm.check(self._group)

    def explain(self, error: Exception) -> None:
        """Report ``error`` to the other ranks, unless another rank's failure explains it.

        Raises:
            PeerError: from ``error``, quoting the rank that failed first.
        """
        alarm = self._alarm
        if alarm is None or alarm.board is None or isinstance(error, PeerError):
            return
        if isinstance(error, ConnectionLostError):
            alarm.explain(error.peer, error)
            raise alarm.refusal(self._group) from error
        # Only what a transfer raises can be another rank's fault; the rest is this rank's own.
        let_down = isinstance(error, RuntimeError) and not isinstance(error, PolyshardError)
        alarm.look()
        if let_down and alarm.report is not None and alarm.report.rank != alarm.rank:
            raise alarm.refusal(self._group) from error
        alarm.fail(f"in group '{self._group}'", error)

    def __enter__(self) -> None:
        """As :meth:`begin`."""
        self.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As :meth:`explain`."""
        if isinstance(error, Exception):
            self.explain(error)
