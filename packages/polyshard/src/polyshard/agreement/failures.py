"""A rank that fails during a step says why, and its peers quote it instead of a time-out.

[Note: failures in a step]
A transfer that never completes tells a rank nothing about the reason: its peer may have raised in a
plugin minutes ago. So whoever raises inside the engine first leaves a line in the process group's
store, and whoever is let down by a transfer looks there before raising. Nothing is polled while all
goes well; peers learn of it when their own transfer ends, at the latest after the process group's
time-out. ``reset_iter_state()`` takes the line back.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from polyshard.agreement.board import Board, open_step_board, said_of
from polyshard.errors import PeerError, PolyshardError

KIND = "step"


class FailureReport:
    """A block inside which exceptions are published, or explained by those of other ranks."""

    def __init__(self, ranks: Sequence[int], group: object) -> None:
        """``ranks`` are those that share transfers with this one.

        ``group`` is asked what it is called (``str(group)``) when there is something to report.
        """
        self._ranks = tuple(ranks)
        self._group = group

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Publish ``error``, unless another rank's explains it.

        Raises:
            PeerError: from ``error``, quoting the ranks that failed first.
        """
        if error is None or not isinstance(error, Exception) or isinstance(error, PeerError):
            return
        board = open_step_board(self._ranks)
        if board is None:
            return
        # Only what a transfer raises can be another rank's fault; the rest is this rank's own.
        let_down = isinstance(error, RuntimeError) and not isinstance(error, PolyshardError)
        quotes = [
            f"rank {rank} failed {text}"
            for rank in self._ranks
            if let_down and rank != board.rank and (text := board.read(KIND, rank))
        ]
        if quotes:
            raise PeerError(
                f"a transfer of group '{self._group}' did not complete, because "
                f"{'; '.join(quotes)}. After mending that, call reset_iter_state() on every rank."
            ) from error
        _publish(board, str(self._group), error)


def _publish(board: Board, group: str, error: Exception) -> None:
    board.post(KIND, f"in group '{group}': {said_of(error)}")


def forget_failure(ranks: Sequence[int]) -> None:
    """Take back what this rank reported."""
    board = open_step_board(ranks)
    if board is not None:
        board.post(KIND, "")
