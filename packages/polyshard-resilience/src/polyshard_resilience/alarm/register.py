"""Which process each rank is, as all of them say when they start, and what has become of it.

[Note: ranks in sight]
A rank that read the record of every other one would make N requests, and all of them N². So a rank
has two kinds of others in sight. The processes of its own host are in one list, which it reads in
one request; their condition is the kernel's to tell. And it listens to the two ranks *beside* it
(those with the numbers before and after), wherever they run. Each rank that is gone or stopped is
in sight of another, which tells all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from polyshard.agreement.board import REQUESTS_PER_SECOND, Board, look
from polyshard_resilience.alarm.courier import ANSWER_SECONDS, Courier, UnansweredError
from polyshard_resilience.alarm.processes import Condition, Process
from polyshard_resilience.alarm.reports import Cause, Report

PULSE_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""How long a rank of another host may be silent while one beside it waits."""
MOST_SECONDS = 3.0
"""What one look may add to a silence: a process that was stopped itself has not listened."""


class Silence:
    """How long others have shown no sign of life, as far as this rank has listened."""

    def __init__(self) -> None:
        """No rank was listened to."""
        self._heard: dict[int, tuple[int, float, float]] = {}

    def of(self, rank: int, sign: int, now: float) -> float:
        """Seconds since the ``sign`` of ``rank`` was another."""
        before, seconds, at = self._heard.get(rank, (sign, 0.0, now))
        seconds = seconds + min(now - at, MOST_SECONDS) if sign == before else 0.0
        self._heard[rank] = (sign, seconds, now)
        return seconds


class Register:
    """Of the ranks of one alarm."""

    def __init__(self, board: Board, courier: Courier) -> None:
        """Empty; ``courier`` asks the store of ``board``."""
        self._board = board
        self._courier = courier
        at, every = board.ranks.index(board.rank), board.ranks
        self.beside = {every[at - 1], every[(at + 1) % len(every)]} - {board.rank}
        self.pulse_seconds = max(PULSE_SECONDS, 2 * len(every) / REQUESTS_PER_SECOND)
        self.known: dict[int, Process] = {}
        """Those that this rank has read."""
        self._host = f"{board.prefix}/host/{zlib.crc32(Process.own().host.encode()):08x}"
        self._listed = ""

    def enter(self) -> None:
        """Tell others which process this rank is; they may know when this returns.

        If a process were killed before, no rank could say that it is gone.
        """
        rank, text = self._board.rank, Process.own().encode()
        entry = f"{rank} {text}\n"
        self._courier.tell(lambda store: cast("Any", store).append(self._host, entry))
        with suppress(UnansweredError):
            key = self._board.key("process", rank)
            self._courier.ask(lambda store: store.set(key, text), ANSWER_SECONDS)

    def read_host(self) -> None:
        """Get to know the processes of this host that have entered."""
        listed = self._courier.look(self._host) or ""
        for line in listed[len(self._listed) :].splitlines():
            rank, _, text = line.partition(" ")
            self.known[int(rank)] = Process.decode(text)
        self._listed = listed or self._listed

    def near(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` on this host: looking at them takes no request."""
        return [r for r in ranks if r in self.known and self.known[r].is_near]

    def in_sight(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that this one looks at. See [Note: ranks in sight]."""
        every = tuple(ranks)
        near = set(every if len(every) == 1 else self.near(every))
        return [r for r in every if r in near or r in self.beside]

    def leave(self, how: str) -> None:
        """This rank's process ends: ranks that wait for it learn that it will not come."""
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

    def ended(self, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` whose process has ended, as far as this one can see."""
        found = {rank: self.report_of(rank) for rank in ranks}
        return {rank for rank, one in found.items() if one and one.cause is Cause.GONE}

    def is_running(self, rank: int) -> bool:
        """Whether it is known to be."""
        process = self.process_of(rank)
        return process is not None and process.condition() is Condition.RUNNING

    @property
    def is_heard_elsewhere(self) -> bool:
        """Whether a rank beside this one, on another host, listens to its pulse."""
        beside = map(self.process_of, self.beside)
        return any(p is not None and not p.is_near for p in beside)

    def pulse(self) -> None:
        """Say that this rank lives."""
        key = self._board.key("pulse", self._board.rank)
        self._courier.tell(lambda store: store.add(key, 1))

    def silent(self, rank: int, silence: Silence, now: float) -> Report | None:
        """That a rank beside this one, on another host, has not pulsed for too long, if so.

        Raises:
            UnansweredError: when the store does not answer.
        """
        process = self.process_of(rank)
        if rank not in self.beside or process is None or process.is_near:
            return None
        key, most = self._board.key("pulse", rank), max(SILENCE_SECONDS, 3 * self.pulse_seconds)
        pulse = self._courier.ask(lambda store: int(look(store, key) or 0), ANSWER_SECONDS)
        if silence.of(rank, pulse, now) <= most:
            return None
        text = (
            f"rank {rank} ({process}) has not responded for {most:.0f} s: it was stopped, or "
            "its host is down or cut off"
        )
        return Report(rank, Cause.GONE, text)
