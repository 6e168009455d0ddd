"""All ranks compare what they are going to do, before anything is communicated.

[Note: meetings]
Every set of ranks meets on its board again and again, and each meeting is concluded once: a single
key, written by the first rank to know, says *met* (all have come) or why not. So ranks never
disagree about how a meeting ended, and a rank that comes to one that was given up gets the same
error as those that waited. Each rank counts the meetings it knows the end of, and enters the next.

A rank that fails before it gets here leaves a report, which stands until that rank starts again.
Others wait :data:`GRACE_SECONDS` for that, then give the meeting up, quoting it; and do so again at
every further attempt while the report stands. A rank that failed as often itself in this meeting
takes no notice: all were told the same, and some ranks take longer than others to recover.

A rank whose process ended or stands still will not come either. Where the handler of failures
knows that, it ends the meeting at once.

Ranks come with two digests: of what must be equal, and of notes, which they may hold different ones
of or none. A difference between notes is no error: every rank is told of it in the same words.

Whatever needs a look at every rank is done by one: of the ranks that wait, the first to come looks
for reports (one for each number of failures of its own, which decides what it takes notice of), and
the last to come compares, where digests differ, and says how. The others read its answer, so that
a meeting takes a few requests a rank. Should that rank be gone, they look for themselves.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from polyshard._torch.private import store_timeout_seconds
from polyshard.agreement.board import REQUESTS_PER_SECOND, Board, open_board, said_of
from polyshard.errors import PeerError, PlanMismatchError
from polyshard.failures import failure_handler

SHOWN_LINES = 20
COMPARED_NOTES = 8
"""Of how many kinds of notes the text is read; each of a thousand ranks may have its own."""
NOTED = "noted"


def difference(texts: Mapping[tuple[int, ...], str]) -> str:
    """What to say about different ``texts``, by the ranks that hold them."""
    first, *others = sorted(texts)
    report = ["ranks planned different things; nothing was communicated yet."]
    for ranks in others:
        before, after = texts[first].splitlines(), texts[ranks].splitlines()
        diff = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]  # without file names
        changed = [line for line in diff if line[:1] in "+-"]
        report.append(f"rank {first[0]} (-) against ranks {list(ranks)} (+):")
        report.extend(changed[:SHOWN_LINES])
        if len(changed) > SHOWN_LINES:
            report.append(f"... and {len(changed) - SHOWN_LINES} more lines")
    report.append("Pass the same model, mesh, policies and plugins on every rank.")
    return "\n".join(report)


def noted(notes: Mapping[tuple[int, ...], Mapping[str, str]]) -> dict[str, list[int]]:
    """The names under which ``notes`` differ, each with the first rank of each kind that does."""
    found: dict[str, dict[str, int]] = {}
    for ranks in sorted(notes):
        for name, text in notes[ranks].items():
            found.setdefault(name, {}).setdefault(text, ranks[0])
    return {name: list(first.values()) for name, first in found.items() if len(first) > 1}


POLL_SECONDS = 0.01
"""How soon a rank that waits asks again, at first: it does less often the longer it waits."""
LOOK_SECONDS = 0.1
"""How often a rank that waits looks for reports of those that have not come."""
GRACE_SECONDS = 0.5
"""How long a rank that reported a failure may take to start again before the others give up."""
MET = "met"
RUNG = "rung"
_TOLD = "_polyshard_was_reported"
STANDING, FAILURES, CONCLUDED = "standing", "failures", "concluded"

_REPORTED: ContextVar[frozenset[tuple[int, ...]]] = ContextVar("_REPORTED", default=frozenset())
"""On which boards a report of this rank (a process, or a thread of one) stands."""


# Failures -----------------------------------------------------------------------------------------


Audiences = Callable[[], Iterable[Sequence[int]]]
"""Sets of ranks to tell; worked out only when there is something to tell."""


def report_failure(audiences: Audiences, error: BaseException) -> None:
    """Tell every set of ranks in ``audiences`` why this one will not come to the next meeting."""
    told = set(error.told) if isinstance(error, PlanMismatchError) else set()
    for ranks in audiences():
        board = open_board(ranks)
        if board is None or len(ranks) == 1 or told.issuperset(ranks):
            continue
        number = _concluded(board)
        times = board.store.add(board.part(number).key(FAILURES, board.rank), 1)
        board.post(STANDING, f"{number} {times} {said_of(error)}")
        board.store.add(f"{board.prefix}/reports", 1)
        _REPORTED.set(_REPORTED.get() | {tuple(ranks)})


def start_again() -> None:
    """Take back what this rank reported: it is about to try anew."""
    for ranks in _REPORTED.get():
        board = open_board(ranks)
        if board is not None:
            board.post(STANDING, "")
    _REPORTED.set(frozenset())


@contextmanager
def reporting(audiences: Audiences) -> Iterator[None]:
    """A block whose exceptions are told to ``audiences``, so that no rank of them waits in vain."""
    start_again()
    try:
        yield
    except Exception as error:
        # By a block inside this one; of processes that ended, the alarm tells.
        if not (getattr(error, _TOLD, False) or isinstance(error, PeerError)):
            try:
                report_failure(audiences, error)
            except Exception as gone:  # the store may have ended: the error itself counts
                error.add_note(f"other ranks could not be told: {said_of(gone)}")
            setattr(error, _TOLD, True)
        raise


# Meetings -----------------------------------------------------------------------------------------


def agree(
    ranks: Sequence[int],
    lines: Sequence[str],
    occasion: str = "the first forward of their sharded model",
    notes: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, list[int]]:
    """Return on every one of ``ranks`` when all have come with the same ``lines``.

    Args:
        ranks: the same on each of them, in the same order.
        lines: what must be equal.
        occasion: what they are about to do, for the error about ranks that do not come.
        notes: texts by name, which may differ, and be there on some ranks only.

    Returns:
        The names of notes that differ, on every rank alike, each with ranks whose texts differ.

    Raises:
        PlanMismatchError: on every one of ``ranks``: when lines differ, a rank failed before, or
            one does not come within the time-out of the store.
        PeerError: on all that are left, when the process of one ended or stands still.
    """
    board = open_board(ranks)
    if board is not None and len(ranks) > 1:
        start_again()
        return meet(board, lines, occasion, notes)
    return {}


def meet(
    board: Board,
    lines: Sequence[str],
    occasion: str = "the meeting",
    notes: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, list[int]]:
    """See :func:`agree`."""
    while True:
        meeting = Meeting(board, _concluded(board), occasion)
        is_over = meeting.ended() is not None
        ended = meeting.attend(lines, notes)
        # Given up because, or after, this rank itself had failed: it was told when it did.
        knew = is_over and (meeting.own_failures() > 0 or board.rank in _culprits(ended))
        verdict = meeting.compare(lines, notes) if ended == MET else ""
        board.store.add(board.key(CONCLUDED, board.rank), 1)
        if verdict.startswith(NOTED):
            return cast("dict[str, list[int]]", json.loads(verdict.removeprefix(NOTED)))
        if verdict:
            raise _refusal(board, verdict)
        if ended == MET:
            return {}
        if ended.startswith(RUNG):
            raise PeerError(ended.partition("\n")[2])
        if not knew:
            raise _refusal(board, ended.partition("\n")[2])


def _refusal(board: Board, text: str) -> PlanMismatchError:
    error = PlanMismatchError(text)
    error.told = board.ranks
    return error


def _concluded(board: Board) -> int:
    return int(board.look(board.key(CONCLUDED, board.rank)) or 0)


def _digests(lines: Sequence[str], notes: Mapping[str, str]) -> str:
    texts = "\n".join(lines), json.dumps(dict(notes))
    return " ".join(hashlib.sha256(text.encode()).hexdigest() for text in texts)


def _culprits(ended: str) -> tuple[int, ...]:
    """Ranks whose own reports ended a meeting: its first line."""
    return tuple(int(rank) for rank in ended.partition("\n")[0].split(",") if rank.isdigit())


@dataclass(frozen=True)
class _Kinds:
    """Sets of ranks that came with other lines than the rest, or else with other notes."""

    ranks: Sequence[tuple[int, ...]]
    are_noted: bool


@dataclass(frozen=True)
class Meeting:
    """One meeting of a board's ranks. See [Note: meetings]."""

    board: Board
    number: int
    occasion: str

    @property
    def _here(self) -> Board:
        return self.board.part(self.number)

    def attend(self, lines: Sequence[str], notes: Mapping[str, str]) -> str:
        """Come, wait for the others, and return how the meeting ended."""
        here, store = self._here, self.board.store
        digest = _digests(lines, notes)
        here.post("digest", digest)
        if store.compare_set(f"{here.prefix}/first", "", digest).decode() != digest:
            store.add(f"{here.prefix}/differing", 1)
        handler, number = failure_handler(), self.number + 1
        # The last rank to come says so as well: others may be slow to see that the meeting ended.
        with handler.waiting(here.ranks, self.board.prefix, number, self.occasion) as in_vain:
            if store.add(f"{here.prefix}/arrived", 1) == len(here.ranks):
                here.post("last", "yes")
                return self._end(MET)
            return self._wait(in_vain)

    def ended(self) -> str | None:
        """How the meeting ended, if it has."""
        return self._here.look(f"{self._here.prefix}/ended")

    def own_failures(self) -> int:
        """How often this rank reported a failure for this meeting."""
        return self._failures_of(self.board.rank)

    def compare(self, lines: Sequence[str], notes: Mapping[str, str]) -> str:
        """How what ranks came with differs, in the same words for all; empty if alike."""
        here = self._here
        if here.look(f"{here.prefix}/differing") is None:
            return ""
        if here.read("last", here.rank):
            kinds = self._kinds()
            self._publish("leads", ",".join(str(ranks[0]) for ranks in kinds.ranks))
            self._show(kinds, lines, notes)
            return self._publish("verdict", self._compared(kinds))
        leads = self._awaited("leads")
        if leads is not None and str(here.rank) in leads.split(","):
            self._post(lines, notes)
        verdict = None if leads is None else self._awaited("verdict")
        if verdict is None:  # the rank that compares is gone
            kinds = self._kinds()
            self._show(kinds, lines, notes)
            verdict = self._compared(kinds)
        return verdict

    def _kinds(self) -> _Kinds:
        """Ranks that came with the same lines, by their digests; else those with the same notes."""
        found: list[dict[str, list[int]]] = [{}, {}]
        for rank in self._here.ranks:
            digests = (self._here.read("digest", rank) or " ").split(" ")
            for kinds, digest in zip(found, digests, strict=True):
                kinds.setdefault(digest, []).append(rank)
        lines, notes = ([tuple(ranks) for ranks in kinds.values()] for kinds in found)
        if len(lines) > 1:
            return _Kinds(lines, are_noted=False)
        return _Kinds(notes[:COMPARED_NOTES], are_noted=True)

    def _post(self, lines: Sequence[str], notes: Mapping[str, str]) -> None:
        self._here.post("lines", "\n".join(lines))
        self._here.post("notes", json.dumps(dict(notes)))

    def _show(self, kinds: _Kinds, lines: Sequence[str], notes: Mapping[str, str]) -> None:
        """Show what this rank came with, if it is the first of the ranks that have it."""
        if any(ranks[0] == self._here.rank for ranks in kinds.ranks):
            self._post(lines, notes)

    def _compared(self, kinds: _Kinds) -> str:
        what = "notes" if kinds.are_noted else "lines"
        texts = {ranks: self._awaited(f"{what}/{ranks[0]}") for ranks in kinds.ranks}
        if not kinds.are_noted:
            return difference({r: t or f"(rank {r[0]} is gone)" for r, t in texts.items()})
        differing = noted({ranks: json.loads(text or "{}") for ranks, text in texts.items()})
        return f"{NOTED}{json.dumps(differing)}"

    def _publish(self, name: str, text: str) -> str:
        self.board.store.set(f"{self._here.prefix}/{name}", text)
        return text

    def _awaited(self, name: str) -> str | None:
        """What is under a key of this meeting as soon as it is there; ``None`` if it never is."""
        deadline = time.monotonic() + store_timeout_seconds(self.board.store)
        for _ in _pauses(len(self.board.ranks)):
            text = self._here.look(f"{self._here.prefix}/{name}")
            if text is not None or time.monotonic() > deadline:
                return text
        raise AssertionError

    def _end(self, how: str) -> str:
        """End the meeting, unless another rank was first; how it ended."""
        ended: bytes = self.board.store.compare_set(f"{self._here.prefix}/ended", "", how)
        return ended.decode()

    def _wait(self, in_vain: Callable[[], str | None]) -> str:
        lookout = _Lookout(self, in_vain)
        for _ in _pauses(len(self.board.ranks)):
            ended = self.ended()
            if ended is None:
                reason = lookout.look(time.monotonic())
                ended = None if reason is None else self._end(reason)
            if ended is not None:
                return ended
        raise AssertionError

    def is_first_to_look(self) -> bool:
        """Whether this rank looks for reports; others with as many failures of their own need not.

        What is looked for differs by that number alone.
        """
        me = str(self.board.rank)
        key = f"{self._here.prefix}/looks/{self.own_failures()}"
        return bool(self.board.store.compare_set(key, "", me).decode() == me)

    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [r for r in self.board.ranks if self._here.read("digest", r) is None]

    def failures(self) -> dict[int, str]:
        """What ranks that have not come reported, and this rank did not meet with as well."""
        if self.board.look(f"{self.board.prefix}/reports") is None:
            return {}
        found = {}
        for rank in self.missing():
            report = self.board.read(STANDING, rank)
            if report is not None:
                number, times, text = report.split(" ", 2)
                if int(number) != self.number or int(times) > self.own_failures():
                    found[rank] = text
        return found

    def _failures_of(self, rank: int) -> int:
        return int(self._here.look(self._here.key(FAILURES, rank)) or 0)

    def absent(self) -> str:
        """The error's text about the missing ranks when time is up."""
        missing, seconds = self.missing(), store_timeout_seconds(self.board.store)
        said = {r: text for r in missing if (text := self.board.read(STANDING, r))}
        quotes = "".join(f" Rank {r} failed: {t.split(' ', 2)[2]}." for r, t in said.items())
        return (
            f"ranks {missing} of {list(self.board.ranks)} did not reach {self.occasion} within "
            f"{seconds:.0f} s (rank {self.board.rank} did). Every rank of the mesh must shard the "
            f"same model and call it; check that all were started.{quotes}"
        )


class _Lookout:
    """What a rank looks for while it waits in a meeting: why it should be given up."""

    def __init__(self, meeting: Meeting, in_vain: Callable[[], str | None]) -> None:
        """It begins to wait; ``in_vain`` says why ranks will not come, once that is known."""
        now = time.monotonic()
        self._meeting = meeting
        self._in_vain = in_vain
        self._looks = meeting.is_first_to_look()
        self._deadline = now + store_timeout_seconds(meeting.board.store)
        if not self._looks:
            self._deadline += GRACE_SECONDS  # the rank that looks also names those that are missing
        self._reports_at = now
        self._blamed_since: float | None = None

    def look(self, now: float) -> str | None:
        """How the meeting is to end, if this rank finds that it should."""
        reason = self._in_vain()
        if reason is not None:
            return f"{RUNG}\n{reason}"
        if now > self._deadline:
            return f"\n{self._meeting.absent()}"
        if self._looks and now >= self._reports_at:
            self._reports_at = now + LOOK_SECONDS
            return self._look_for_reports(now)
        return None

    def _look_for_reports(self, now: float) -> str | None:
        failures = self._meeting.failures()
        self._blamed_since = (self._blamed_since or now) if failures else None
        since = self._blamed_since
        return _quoted(failures) if since is not None and now - since > GRACE_SECONDS else None


def _pauses(ranks: int) -> Iterator[None]:
    """Begin at once, then ever more seldom: many ranks share one store."""
    seconds = POLL_SECONDS
    while True:
        yield
        time.sleep(seconds)
        seconds = min(1.5 * seconds, max(LOOK_SECONDS / 4, ranks / REQUESTS_PER_SECOND))


def _quoted(failures: dict[int, str]) -> str:
    ranks = ",".join(map(str, failures))
    texts = "; ".join(f"rank {r} failed while planning: {text}" for r, text in failures.items())
    return f"{ranks}\n{texts}"
