"""When a rank fails, all know within a second: one alarm for the ranks of the default group.

[Note: alarm]
A transfer that never completes tells a rank nothing: its peer may have raised in a plugin minutes
ago. So whatever ends the work of a rank is *rung*: a rank writes it to the store, which keeps the
first report of an *epoch* and drops later ones. Every rank has a thread that looks for reports
(``alarm/watch.py``), and all connections of the engine are its own. A rank that finds a report cuts
them (see [Note: cutting] of ``_torch_private.py``), which wakes every wait on them. The handler
(``handler.py``) then raises an error with the report instead of gloo's.

On a device the engine's collectives are those of the mesh's process groups. They pair by order, so
once ranks have left a step at different places no later one is valid. A rank that finds a report
aborts them all (see [Note: aborting] there) and says so, and recovery makes them anew.

A rank rings for its own failures: exceptions in the engine and in plugins, in the model's forward
and backward, and any that ends its process. Any rank rings for what it notices of others: a process
that is gone or stopped (seen in ``/proc`` on the same host, in a broken connection from another),
and ranks that wait for each other at different places
(:mod:`polyshard_resilience.alarm.positions`).

The next outermost forward begins a new epoch: connections are made anew among the ranks that come.
Ranks need no message about that: each enters the first epoch that no rank has ended. So a rank that
fails again while others still recover costs these others nothing.

[Note: ranks that are away]
A rank that left the model by ``resize()`` takes part in nothing, and its process may end as it
likes. Others look at it, and wait for it, only where they wait for it by name: in the next resize
for example. A rank that they transfer with again, for another model, is not away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist

from polyshard.agreement.board import REQUESTS_PER_SECOND, Board, look, said_of
from polyshard.errors import (
    ControlFlowError,
    GradientMismatchError,
    PeerError,
    PolyshardError,
)
from polyshard_resilience._torch_private import (
    abort,
    begun_collectives,
    on_devices,
    own_client,
    workings,
)
from polyshard_resilience.alarm.courier import ANSWER_SECONDS, Courier, UnansweredError
from polyshard_resilience.alarm.cuts import NOTHING_BROKEN, Broken, Cuts, Epochs
from polyshard_resilience.alarm.register import Register
from polyshard_resilience.alarm.reports import NOBODY, Cause, Report, unexplained

LOOK_SECONDS = 0.1
"""How often a rank looks for a report; more seldom where very many share one store."""
LOOKS_FOR_OLD = 8
"""One of so many also finds a report that the store keeps no more."""
EXPLAIN_SECONDS = 0.5
"""How long a rank whose connection broke waits for another to say why."""
ACCOUNT_SECONDS = 5.0
"""How long a rank that recovers waits for others to do so."""
LEAVING = (SystemExit, KeyboardInterrupt)
"""They end the process, unless they are caught on the way."""
RECOVER_SECONDS = 10.0
"""How long a new epoch may wait for the store."""


class Connections(Protocol):
    """What ranks send over; an alarm wakes the threads that wait in it."""

    def cut(self) -> None:
        """End all transfers, from any thread; new ones are refused."""
        ...

    def renew(self) -> None:
        """Connect anew at the next use."""
        ...

    def posted(self) -> dict[str, int]:
        """How many transfers of each key this rank has begun lately."""
        ...


class Waiting(Protocol):
    """What the main thread waits for, as other threads may look at it."""

    def peers(self) -> tuple[int, ...]:
        """The ranks that may keep it waiting; none when it has just ended."""
        ...

    def place(self) -> tuple[int, str, int] | None:
        """The rank it waits for, the key of the transfer, and its number among those of this key.

        The rank is :data:`NOBODY` where it waits for all of :meth:`peers`. ``None`` when it has
        just ended.
        """
        ...


class Alarm:
    """See [Note: alarm]. Without a ``board`` there are no others to tell, and nothing happens."""

    def __init__(self, board: Board | None) -> None:
        """For all ranks of ``board``; quiet until :meth:`start`."""
        self.board = board
        self.report: Report | None = None
        """What ended this epoch, if anything has."""
        self.epoch = 0
        self.is_seen = False
        """Whether this rank raised since."""
        self.waiting: Waiting | None = None
        """What the main thread waits for."""
        self.parts = 0
        """How many parts of steps it has begun."""
        self.doing: object = "the first forward"
        """What it is at: asked for its name (``str()``) when there is something to say."""
        self.gathered: dict[str, int] = {}
        """How often it has come to wait for all of some ranks, by what they gather for."""
        self.turns = 0
        """Outermost forwards so far."""
        self.gone: dict[int, Report] = {}
        """Ranks that will not come back, and what is known of them."""
        self.told: set[int] = set()
        """Those of them of which all ranks were told."""
        self.away: frozenset[int] = frozenset()
        """Ranks that hold no model any more. See [Note: ranks that are away]."""
        self.connections: dict[object, Connections] = {}
        self.mending: dict[str, object] = {}
        """What process groups were repaired with, by their names: not the alarm's to cut."""
        self._has_cut = False
        self._cutting = threading.Lock()
        self._looks = 0
        self._left: Report | None = None
        """What ended the epoch before, until :meth:`broken_groups` has asked what broke in it."""
        self._lock = threading.Lock()
        seconds = LOOK_SECONDS
        if board is not None:
            seconds = max(seconds, 2 * len(board.ranks) / REQUESTS_PER_SECOND)
            self.courier = Courier(own_client(board.store), self._look, seconds)
            self.register = Register(board, self.courier)

    def start(self) -> None:
        """Look for reports from now on, and tell others which process this is."""
        if self.board is not None:
            self.courier.start()
            self.register.enter()

    @property
    def rank(self) -> int:
        """This rank."""
        return NOBODY if self.board is None else self.board.rank

    # Telling ----------------------------------------------------------------------------------

    def fail(self, where: str, error: BaseException, *, ends: bool = False) -> Report:
        """This rank cannot continue because of ``error``, which ``ends`` its process or not."""
        text = f"rank {self.rank} failed {where}: {said_of(error)}"
        cause = Cause.GONE if ends or isinstance(error, LEAVING) else Cause.RAISED
        if isinstance(error, GradientMismatchError):
            text, cause = str(error), Cause.VERDICT
        standing = self.ring(Report(self.rank, cause, text))
        self.see()  # it raises something anyway
        return standing

    def ring(self, report: Report, epoch: int | None = None) -> Report:
        """Tell all ranks; the report that stands, which may be another's.

        Nothing is told of an ``epoch`` that is over, in which the caller saw what it reports.
        """
        if self.board is None or self.report is not None:
            return self.report or report
        epoch, epochs = self.epoch if epoch is None else epoch, self._epochs
        standing = report
        is_silent = self.courier.silence(time.monotonic()) > ANSWER_SECONDS / 2
        with suppress(UnansweredError):
            text = self.courier.ask(
                lambda store: epochs.end(store, epoch, report.encode()),
                0.0 if is_silent else ANSWER_SECONDS,
            )
            standing = Report.decode(text)
        self.hear(epoch, standing)
        return standing

    def see(self) -> None:
        """This rank raises, or gives the step up."""
        with self._lock:
            self.is_seen = True

    def cut_elsewhere(self, epoch: int, cut: Callable[[], None]) -> None:
        """Call ``cut`` if this rank has not raised in ``epoch`` yet, and tell others before.

        What it is woken from raises, or else its next forward does. It leaves the epoch no sooner
        than ``cut`` has ended, which would else cut what was repaired.
        """
        with self._cutting:
            with self._lock:
                if self.is_seen or self._has_cut or self.epoch != epoch:
                    return
                self._has_cut = True
                self.say_cut()
            cut()

    def broken_groups(self) -> Broken:
        """The process groups that are broken after a failure. See [Note: who has cut].

        Waits until all ranks have come to the epoch that this one has entered, if they will, for
        :data:`ACCOUNT_SECONDS` at most. So ranks that fail again, all of them, do so in one epoch.
        Asked once after each failure.

        Raises:
            PeerError: when others have begun without what this rank has cut since.
        """
        report, self._left = self._left, None
        if self.board is None or report is None:
            return NOTHING_BROKEN
        come, repaired = self._epochs.come(self.epoch), self._epochs.repaired(self.epoch)
        stopped = {report.rank} if report.cause is Cause.STOPPED else set()
        silent = self.gone.keys() | stopped | self.away
        for _ in _moments(ACCOUNT_SECONDS):
            if int(self.courier.look(come) or 0) >= len(self.board.ranks) - len(silent):
                break
            if self.report is not None:  # of another failure, after which this is asked again
                return NOTHING_BROKEN
        cuts = self._cuts
        try:
            broken, agreed = self.courier.ask(lambda s: cuts.agree(s, repaired), ANSWER_SECONDS)
        except UnansweredError:
            return NOTHING_BROKEN
        own = [(name, each.breakers) for name, each in workings().items()]
        if all(agreed.includes(*each) for each in own if broken.includes(*each)):
            return agreed
        text = f"rank {self.rank} came to repair process groups {broken} when others had begun"
        self.ring(Report(self.rank, Cause.RAISED, text))
        raise self.because("process groups could not be repaired")

    def say_cut(self) -> None:
        """The process groups of this rank are broken."""
        cuts, rank = self._cuts, self.rank
        self.courier.tell(lambda store: cuts.add(store, rank))

    def say_mended(self, groups: Collection[str]) -> None:
        """They work again: of those of this rank, ``groups`` were broken."""
        cuts, rank = self._cuts, self.rank
        self.courier.tell(lambda store: cuts.mended(store, rank, groups))

    def add_detail(self, error: BaseException) -> None:
        """Quote ``error``, if this rank's own report lacks the exception."""
        report = self.report
        if (
            self.board is None
            or report is None
            or report.rank != self.rank
            or not report.quotes_within
        ):
            return
        self.report = report.with_detail(said_of(error))
        key, text = self._epochs.detail(self.epoch), said_of(error)
        self.courier.tell(lambda store: store.set(key, text))

    @property
    def _epochs(self) -> Epochs:
        assert self.board is not None
        return Epochs(self.board.prefix)

    @property
    def _cuts(self) -> Cuts:
        assert self.board is not None
        return Cuts(self.board.prefix)

    # Hearing ----------------------------------------------------------------------------------

    def hear(self, epoch: int, report: Report) -> None:
        """``report`` ended ``epoch``. This rank leaves it no sooner than all waits have ended."""
        with self._cutting:
            with self._lock:
                if epoch != self.epoch or self.report is not None:
                    return
                self.report, self.is_seen = report, False
                if report.cause is Cause.GONE and report.rank not in (self.rank, NOBODY):
                    self.gone[report.rank] = report
                    self.told.add(report.rank)
            devices, cuts = on_devices(), self._cuts
            if devices:
                self.courier.tell(lambda store: cuts.aborted(store, devices))
                abort(devices)
            for connections in list(self.connections.values()):
                connections.cut()

    def _look(self, store: dist.Store) -> None:
        if self.report is None:
            epoch, epochs = self.epoch, self._epochs
            self._looks += 1  # two requests take longer, and few ranks are that late
            is_whole = self._looks % LOOKS_FOR_OLD == 0
            told = epochs.told(store, epoch) if is_whole else look(store, epochs.report(epoch))
            if told is not None:
                self.hear(epoch, Report.decode(told))

    def look(self) -> None:
        """Look for a report now, as the thread would in a moment."""
        if self.board is not None and self.report is None:
            epoch, epochs, told = self.epoch, self._epochs, None
            with suppress(UnansweredError):
                told = self.courier.ask(lambda store: epochs.told(store, epoch), ANSWER_SECONDS)
            if told is not None:
                self.hear(epoch, Report.decode(told))

    def check(self, what: object) -> None:
        """Refuse to begin ``what`` when the step is lost already.

        Raises:
            PeerError: if so.
        """
        if self.report is not None:
            raise self.refusal(what)

    def refusal(self, group: object) -> PolyshardError:
        """Why a transfer of ``group`` cannot continue; there is a report."""
        return self.because(f"a transfer of group '{group}' did not complete")

    def because(self, what: str) -> PolyshardError:
        """The error that says ``what`` happened, and that the report is why; or the verdict."""
        report = self._with_detail()
        self.see()
        if report.cause is Cause.VERDICT:
            return GradientMismatchError(report.text)
        kind = ControlFlowError if report.cause is Cause.APART else PeerError
        return kind(f"{what}, because {report.said} {report.remedy}")

    def _with_detail(self) -> Report:
        report = self.report
        assert report is not None
        if not report.quotes_within or self.board is None:
            return report
        key = self._epochs.detail(self.epoch)
        for _ in _moments(report.quotes_within):
            detail = self.courier.look(key)
            if detail is not None:
                self.report = report.with_detail(detail)
                break
        return self.report or report

    def explain(self, peer: int | None, error: Exception) -> Report:
        """Why a transfer with ``peer`` broke with ``error``: what was told, or what can be seen."""
        if self.board is None:
            return Report(NOBODY, Cause.GONE, str(error))
        for _ in _moments(EXPLAIN_SECONDS):
            self.look()
            every = [rank for rank in self.board.ranks if rank not in self.away]
            self.look_at_processes(every if peer is None else (peer,))
            if self.report is not None:
                return self.report
        self.look_at_processes(self.expected(self.board.ranks))
        is_there = peer is not None and self.register.is_running(peer)
        return self.report or self.ring(unexplained(peer, error, is_there=is_there))

    # Processes --------------------------------------------------------------------------------

    def expected(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that are not away, and that not all ranks know to be gone.

        In a later epoch, only a rank that waits for one that is gone says so again: the others
        may be repairing their groups.
        """
        return [rank for rank in ranks if rank not in self.told and rank not in self.away]

    def expect(self, ranks: Iterable[int]) -> None:
        """This rank communicates with ``ranks`` now: none of them is away."""
        self.away = self.away.difference(ranks)

    def look_at_processes(self, ranks: Iterable[int]) -> None:
        """Ring for the first of ``ranks`` in sight whose process ended or was stopped, if any."""
        assert self.board is not None
        for rank in self.register.in_sight(ranks):
            if self.report is None and rank != self.rank:
                report = self.register.report_of(rank)
                if report is not None:
                    self.ring(report)

    def look_for_gone(self, ranks: Iterable[int]) -> None:
        """Ring again for one of ``ranks`` that was gone in an earlier epoch, if any."""
        for rank in self.gone.keys() & set(ranks):
            self.ring(self.gone[rank])

    # Epochs -----------------------------------------------------------------------------------

    def posted(self) -> dict[str, int]:
        """How many transfers of each key this rank has begun lately, and what it has come to."""
        posted = dict(self.gathered)
        for connections in list(self.connections.values()):
            posted.update(connections.posted())
        return posted

    def begin_turn(self) -> None:
        """An outermost forward starts: what ended before is over, once this rank has said so.

        Raises:
            PeerError: when it was let down without noticing: the others do the last step again.
        """
        self.turns += 1
        with self._lock:  # a report that comes from now on is this step's
            report, is_seen = self.report, self.is_seen
        if report is None:
            return
        if not is_seen:
            self.see()
            report = self._with_detail()
            raise PeerError(
                f"the next forward cannot start, because {report.said} The step before is lost on "
                f"all ranks. {report.remedy}"
            )
        self.begin_anew()

    def first_free(self, number: int) -> int:
        """The first epoch from ``number`` on that no rank has ended; there is a board."""
        epochs = self._epochs
        with suppress(UnansweredError):
            return self.courier.ask(lambda store: epochs.first_free(store, number), RECOVER_SECONDS)
        return number

    def begin_anew(self, number: int | None = None) -> None:
        """If this epoch was ended, enter ``number``, by default the next that was not."""
        if self.board is None or (self.report is None and number is None):
            return
        epochs = self._epochs
        if number is None:
            number = self.first_free(self.epoch + 1)
        with self._cutting, self._lock:
            self._left = self.report
            self.epoch, self.report, self.is_seen, self._has_cut = number, None, False, False
        begun, cuts = begun_collectives(), self._cuts
        self.courier.tell(lambda store: cuts.compare(store, number, begun))
        if self.rank not in self.away:
            self.courier.tell(lambda store: store.add(epochs.come(number), 1))
        for connections in self.connections.values():
            connections.renew()


def _moments(seconds: float) -> Iterator[None]:
    """Again and again until ``seconds`` have passed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(LOOK_SECONDS / 5)
