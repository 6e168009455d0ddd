"""A rank that fails during a step says why, and its peers quote it instead of gloo's words."""

from __future__ import annotations

from types import TracebackType

from polyshard.alarm.alarm import Alarm
from polyshard.alarm.current import current_alarm
from polyshard.errors import ConnectionLostError, PeerError, PolyshardError


class FailureReport:
    """A block inside which exceptions are rung, or explained by those of other ranks.

    See [Note: alarm].
    """

    def __init__(self, group: object, place: object = None) -> None:
        """``group`` is asked what it is called (``str(group)``) when there is something to say.

        So is ``place``, for ranks that ask where this one is.
        """
        self._group = group
        self._place = group if place is None else place
        self._alarm: Alarm | None = None

    @property
    def alarm(self) -> Alarm:
        """That of the process group in use; kept, as asking for it takes a moment."""
        if self._alarm is None:
            self._alarm = current_alarm()
        return self._alarm

    def __enter__(self) -> None:
        """Refuse to begin in a step that is lost.

        Raises:
            PeerError: quoting the rank that failed first.
        """
        alarm = self.alarm
        alarm.doing = self._place
        if alarm.report is not None:
            alarm.check(self._group)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ring for ``error``, unless another rank's failure explains it.

        Raises:
            PeerError: from ``error``, quoting the rank that failed first.
        """
        if error is None or not isinstance(error, Exception) or isinstance(error, PeerError):
            return
        alarm = self.alarm
        if alarm.board is None:
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
