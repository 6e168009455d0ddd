"""How an attempt went, in the same words on every rank.

[Note: ballots]
All ranks of an attempt come to a *ballot* twice: before the first of them lets an optimizer change
anything, and when the block has ended. After a failure they do so twice more: when no rank has
anything left to tell of it, since a later report would end what a rank begins after it has gone
back; and when all have gone back. The rank that comes last concludes the ballot, by one key of the
store that the others wait for. So a rank makes a handful of requests however many ranks there are,
and none of it is a collective, to which a rank that failed would not come. A rank that failed says
so and comes as well; then the verdict is the same for all: none of them continues.

An error that another rank's failure caused (:class:`~polyshard.errors.PeerError`) explains nothing:
it counts only where no rank has a reason of its own. For a rank that was killed or stopped any
other one concludes the ballot, as soon as it sees that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
import torch.distributed as dist

from polyshard._torch.private import store_timeout_seconds
from polyshard.agreement.board import REQUESTS_PER_SECOND, Board, open_board, said_of
from polyshard.errors import ControlFlowError, OutOfStepError, PeerError
from polyshard_resilience._torch_private import await_devices
from polyshard_resilience.alarm.alarm import LEAVING
from polyshard_resilience.alarm.current import current_alarm
from polyshard_resilience.alarm.peers import (
    Absent,
    Roll,
    gathering,
    go_on_to,
    lost,
    tell,
    tell_again,
)
from polyshard_resilience.alarm.reports import NOBODY, Cause
from polyshard_resilience.mending import mend_groups

BALLOTS = READY, DONE, TOLD, UNDONE = "ready", "done", "told", "undone"
FIRST_PAUSE_SECONDS = 1e-4
LONGEST_PAUSE_SECONDS = 0.025
LOOK_SECONDS = 0.05
"""How often a rank that waits asks whether all others are still there; ever more seldom, too."""
KEEPER_SECONDS = 1.0
"""How long the process that kept the store may take to end after its connections."""
HOST_MEMORY = "DefaultCPUAllocator"
"""Whose name is in torch's error when the host has no memory left: a plain ``RuntimeError``."""

DISAGREED = -1
COMERS = 1 << 24
"""More than ranks: a count of them and a sum of what each can still try share one number."""


class Kind(Enum):
    """What ended an attempt."""

    SUCCESS = "success"
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    GONE = "gone"


@dataclass(frozen=True)
class Verdict:
    """How an attempt went, for all of its ranks.

    Attributes:
        kind: what ended it.
        said: what the ranks that failed said, by rank.
        left: how many smaller sizes every rank can try; :data:`DISAGREED` if not as many.
        epoch: of what ranks begin when all have gone back.
    """

    kind: Kind = Kind.SUCCESS
    said: Mapping[int, str] = field(default_factory=dict)
    left: int = 0
    epoch: int = 0

    def __bool__(self) -> bool:
        return self.kind is Kind.SUCCESS

    def text(self) -> str:
        """For the store."""
        return json.dumps([self.kind.value, dict(self.said), self.left, self.epoch])

    @staticmethod
    def read(text: str) -> Verdict:
        """What :meth:`text` made."""
        kind, said, left, epoch = json.loads(text)
        return Verdict(Kind(kind), {int(rank): words for rank, words in said.items()}, left, epoch)


class _HalfUndoneError(RuntimeError):
    """A rank could not go back, and none of the ranks can continue."""


def verdict_on(rank: int, error: BaseException, left: int) -> Verdict:
    """What ``error`` of one rank means for all."""
    if isinstance(error, LEAVING):
        return Verdict(Kind.GONE, {rank: f"{said_of(error)}, with which it leaves"}, left)
    if isinstance(error, _HalfUndoneError):
        return Verdict(Kind.GONE, {rank: str(error)}, left)
    if isinstance(error, (OutOfStepError, ControlFlowError)):  # of no single rank
        kind = Kind.GONE if isinstance(error, OutOfStepError) else Kind.FAILED
        return Verdict(kind, {NOBODY: str(error)}, left)
    kind = Kind.OUT_OF_MEMORY if is_out_of_memory(error) else Kind.FAILED
    return Verdict(kind, {rank: said_of(error)}, left)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, of a device or of the host, be it behind an error of a plugin's."""
    if error is None or isinstance(error, PeerError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and HOST_MEMORY in str(error):
        return True
    return is_out_of_memory(error.__cause__)


def go_back(ballot: Ballot, verdict: Verdict, put_back: Callable[[], None]) -> Verdict:
    """Undo together what ``verdict`` says has failed; what ranks say of it afterwards.

    Args:
        ballot: that was lost.
        verdict: how.
        put_back: what this rank undoes, without talking to others.
    """
    is_gone = verdict.kind is Kind.GONE
    if not is_gone:
        ballot.cast(TOLD, None)
    alarm = current_alarm()
    alarm.look()
    if alarm.report is not None:
        await_devices()  # what was aborted there writes no more
    failed, half = None, None
    try:
        put_back()
    except Exception as error:  # the others wait for this rank
        failed = error
        half = _HalfUndoneError(f"the failed step could not be undone ({said_of(error)})")
    if not is_gone:
        # A rank that failed again while others still went back would be heard by none of them:
        # what they begin anew is after that failure.
        after = ballot.cast(UNDONE, _unmended() if failed is None else half)
        go_on_to(after.epoch)
        verdict = verdict if after else after
    lost(verdict.said if verdict.kind is Kind.GONE else {})
    if failed is not None:
        failed.add_note("raised while a failed step was undone, of which a part is left here")
        raise failed
    return verdict


def _unmended() -> PeerError | None:
    """Repair process groups that were broken; why that failed, if it did."""
    try:
        mend_groups(current_alarm())
    except PeerError as error:
        return error
    return None


class Ballot:
    """The ballots of one attempt on one rank. See [Note: ballots]."""

    def __init__(self, ranks: Sequence[int], left: int) -> None:
        """Every one of ``ranks`` makes one, as often as the others."""
        board = open_board(ranks) if len(ranks) > 1 else None
        self._left = left
        self._board: Board | None = None
        self._before: Board | None = None
        self._lost: RuntimeError | None = None
        self._number = 0
        if board is not None:
            self._board = self._numbered(board.part("attempts"))

    def _numbered(self, board: Board) -> Board:
        """The part of ``board`` for this attempt, which other ranks count as well."""
        try:
            number = board.store.add(board.key("number", board.rank), 1)
        except RuntimeError as lost:
            self._lost = lost
            return board
        self._number, self._before = number, board.part(number - 1)
        return board.part(number)

    def cast(self, name: str, error: BaseException | None) -> Verdict:
        """Come to the ballot ``name`` with what was raised here, if anything; how it ended."""
        board = self._board
        if board is None:
            own = dist.get_rank() if dist.is_initialized() else 0
            return Verdict() if error is None else verdict_on(own, error, self._left)
        try:
            if self._lost is not None:
                raise self._lost
            key, count = board.prefix.rpartition("/")[0], self._number * 4 + BALLOTS.index(name)
            what = f"the vote of an attempt whether it is {name}"
            ended = self._come(board, name, error)
            with gathering(board.ranks, key, count, what):
                return ended or self._awaited(board, name, error)
        except RuntimeError as lost:  # the store is gone with the rank that kept it
            return self._without_store(board, lost)

    def _without_store(self, board: Board, lost: RuntimeError) -> Verdict:
        roll, end = Roll(board.ranks), time.monotonic() + KEEPER_SECONDS
        while (absent := roll.call()) is None and time.monotonic() < end:
            time.sleep(LONGEST_PAUSE_SECONDS)
        said = f"the store of the process group cannot be reached ({lost})"
        return Verdict(Kind.GONE, {NOBODY: said} if absent is None else absent.said, self._left)

    def leave(self, name: str, error: BaseException) -> None:
        """Come with an error, and wait for no other rank: the process may be about to end."""
        if self._board is not None and self._lost is None:
            with suppress(RuntimeError):
                self._come(self._board, name, error)
                if not isinstance(error, LEAVING):
                    for later in (TOLD, UNDONE):
                        self._come(self._board, later, None)

    def _come(self, board: Board, name: str, error: BaseException | None) -> Verdict | None:
        """The verdict, if this rank was the last to come."""
        if error is not None:
            kind = "misled" if isinstance(error, PeerError) else "failed"
            verdict = verdict_on(board.rank, error, self._left)
            board.store.compare_set(f"{board.prefix}/{kind}", "", verdict.text())
        come = board.store.add(f"{board.prefix}/{name}/come", 1 + COMERS * self._left)
        if come % COMERS < len(board.ranks):
            return None
        ended = board.look(f"{board.prefix}/failed") or board.look(f"{board.prefix}/misled")
        verdict = Verdict.read(ended) if ended else Verdict()
        if come // COMERS != self._left * len(board.ranks):
            verdict = replace(verdict, left=DISAGREED)
        if name == UNDONE:  # before any rank continues, and may fail again
            alarm = current_alarm()
            verdict = replace(verdict, epoch=alarm.first_free(alarm.epoch))
        verdict = self._conclude(board, name, verdict)
        self._tidy(board, verdict)
        return verdict

    def _conclude(self, board: Board, name: str, verdict: Verdict) -> Verdict:
        """End the ballot, unless another rank was first; how it ended."""
        ended: bytes = board.store.compare_set(f"{board.prefix}/{name}/ended", "", verdict.text())
        return Verdict.read(ended.decode())

    def _tidy(self, board: Board, verdict: Verdict) -> None:
        """Remove what no rank will look at any more: all have come to this attempt by now."""
        old = []
        if self._before is not None:
            prefix = self._before.prefix
            old = [f"{prefix}/{name}/{key}" for name in BALLOTS for key in ("come", "ended")]
            self._before = None
        if not verdict:
            old += [f"{board.prefix}/failed", f"{board.prefix}/misled"]
        for key in old:
            board.store.delete_key(key)

    def _awaited(self, board: Board, name: str, error: BaseException | None) -> Verdict:
        key, pause = f"{board.prefix}/{name}/ended", FIRST_PAUSE_SECONDS
        begin = looked = time.monotonic()
        roll, share = Roll(board.ranks), len(board.ranks) / REQUESTS_PER_SECOND
        while not board.store.check([key]):
            time.sleep(pause)
            now = time.monotonic()
            pause = min(2 * pause, max(LONGEST_PAUSE_SECONDS, share, (now - begin) / 8))
            if now - looked > max(LOOK_SECONDS, 8 * share):
                looked = now
                if error is not None:
                    tell_again(error)  # a forward may have begun since
                absent = roll.call() or self._apart(name) or self._late(now - begin)
                if absent is not None and not board.store.check([key]):
                    kind = Kind.GONE if absent.is_final else Kind.FAILED
                    told = board.look(f"{board.prefix}/failed")
                    own = Verdict.read(told).said if told else {}  # of a rank that left, say
                    said = {rank: own.get(rank, text) for rank, text in absent.said.items()}
                    return self._conclude(board, name, Verdict(kind, said, self._left))
        return Verdict.read(board.store.get(key).decode())

    def _apart(self, name: str) -> Absent | None:
        """What to say when others wait for this rank elsewhere, and it for them here."""
        report = current_alarm().report
        if name not in (READY, DONE) or report is None or report.cause is not Cause.APART:
            return None
        return Absent({NOBODY: f"{report.said} {report.remedy}"}, is_final=False)

    def _late(self, seconds: float) -> Absent | None:
        """What to say when the time-out of the store has passed."""
        assert self._board is not None
        limit = store_timeout_seconds(self._board.store)
        if seconds < limit:
            return None
        said = f"timed out: not every rank came within {limit:.0f} s"
        tell(TimeoutError(said))
        return Absent({self._board.rank: said}, is_final=False)
