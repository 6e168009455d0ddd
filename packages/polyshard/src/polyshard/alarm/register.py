"""Which process each rank is, as all of them say when they start, and what has become of it."""

from __future__ import annotations

from contextlib import suppress

from polyshard.alarm.board import Board, look
from polyshard.alarm.courier import ANSWER_SECONDS, Courier, UnansweredError
from polyshard.alarm.processes import Condition, Process
from polyshard.alarm.reports import Cause, Report


class Register:
    """Of the ranks of one alarm."""

    def __init__(self, board: Board, courier: Courier) -> None:
        """Nobody is in it; ``courier`` asks the store of ``board``."""
        self._board = board
        self._courier = courier
        self.known: dict[int, Process] = {}
        """Those that this rank has read."""

    def enter(self) -> None:
        """Tell others which process this rank is; they may know when this returns.

        Of a process that was killed before, nobody could say that it is gone.
        """
        key, text = self._board.key("process", self._board.rank), Process.own().encode()
        with suppress(UnansweredError):
            self._courier.ask(lambda store: store.set(key, text), ANSWER_SECONDS)

    def leave(self, how: str) -> None:
        """This rank's process ends: whoever waits for it may know that it will not come."""
        key = self._board.key("left", self._board.rank)
        self._courier.tell(lambda store: store.set(key, how))

    def process_of(self, rank: int) -> Process | None:
        """Which process ``rank`` is, once it has said so."""
        if rank not in self.known:
            text = self._courier.look(self._board.key("process", rank))
            if text is None:
                return None
            self.known[rank] = Process.decode(text)
        return self.known[rank]

    def report_of(self, rank: int) -> Report | None:
        """That its process ended or was stopped, if so."""
        process = self.process_of(rank)
        condition = Condition.ELSEWHERE if process is None else process.condition()
        if condition is Condition.STOPPED:
            return Report(rank, Cause.STOPPED, f"rank {rank} was stopped ({process})")
        if condition is Condition.RUNNING:
            return None
        how = self._courier.look(self._board.key("left", rank))
        if how is not None:
            return Report(rank, Cause.GONE, f"rank {rank} has ended: {how}")
        if condition is Condition.GONE:
            text = f"rank {rank} is gone: {process} was killed, or ended without a word"
            return Report(rank, Cause.GONE, text)
        return None

    def is_running(self, rank: int) -> bool:
        """Whether it is known to be."""
        process = self.process_of(rank)
        return process is not None and process.condition() is Condition.RUNNING

    def pulse_of(self, rank: int) -> int:
        """How often ``rank`` has said that it lives.

        Raises:
            UnansweredError: when the store does not answer.
        """
        key = self._board.key("pulse", rank)
        return self._courier.ask(lambda store: int(look(store, key) or 0), ANSWER_SECONDS)
