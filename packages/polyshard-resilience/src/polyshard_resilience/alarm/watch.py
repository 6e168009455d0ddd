"""The thread that watches how long this rank waits, and for which others. See [Note: alarm].

A rank that waits for more than a moment looks at the processes in its sight (gone, stopped; see
[Note: ranks in sight] of ``register.py``), tells the others where it is, and looks for a circle
(see [Note: ranks apart]). While nothing waits there are pulses alone, between hosts.

[Note: waits elsewhere]
A rank may also wait in a collective that is not the engine's (a sum of losses, activations of
tensor parallelism) when the step is lost, and its peers never come. The engine should not break
those process groups: ranks that have all raised may need them to agree on what to do. While a rank
waits there, it looks at processes of its own host, which takes no request. As the last resort, a
rank cuts the groups if it has not raised :data:`ELSEWHERE_SECONDS` after the report and is still in
``torch.distributed``. ``reset_iter_state()`` repairs them (see [Note: repaired groups] of
``mending.py``).

[Note: waits for a device]
A host that waits for a device may stand anywhere in a program, and use its processor. So where
there are collectives on a device, a rank that has begun no part of a step for a moment looks at the
processes of its own host.

[Note: looking at a thread]
Where the main thread stands is read from its frames, by ``sys._current_frames()``, which locks the
interpreter's list of threads. ``faulthandler.dump_traceback(all_threads=True)`` makes no frame
objects but goes through that list without the lock. A native thread that enters Python at that
moment is in the list before it is initialised, and the process ends with a segmentation fault
(CPython 3.11.7, ``init_threadstate``). gloo's threads do so whenever they give back memory that
belongs to an object of Python's. Frames are asked for only while the thread stands still: it has
used no processor time since the last tick.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType

import torch.distributed as dist

from polyshard.agreement.board import look
from polyshard_resilience._torch_private import COLLECTIVES, cut_groups, on_devices
from polyshard_resilience.alarm.alarm import Alarm, Waiting
from polyshard_resilience.alarm.courier import ANSWER_SECONDS, UnansweredError
from polyshard_resilience.alarm.positions import Circle, Position, circle_from
from polyshard_resilience.alarm.register import MOST_SECONDS, SILENCE_SECONDS, Silence
from polyshard_resilience.alarm.reports import NOBODY, Cause, Report

logger = logging.getLogger("polyshard")

TICK_SECONDS = 0.1
PATIENCE_SECONDS = 0.3
"""A shorter wait is not looked at."""
ELSEWHERE_SECONDS = 0.4
"""How long a rank may take to leave ``torch.distributed`` after it has found a report."""
FRAMES = 12
"""How deep below a call of ``torch.distributed`` a thread may stand."""
RANKS_PER_TICK = 64
"""So many ranks may ask the store for each other's places in every tick; more take turns."""


class Watch:
    """Watches one alarm's rank from a thread of its own."""

    def __init__(self, alarm: Alarm) -> None:
        """Nothing happens before :meth:`start`."""
        assert alarm.board is not None
        self._alarm = alarm
        self._board = alarm.board
        self._ended = threading.Event()
        self._main = _Thread()
        self._thread = threading.Thread(target=self._run, name="polyshard-watch", daemon=True)
        self._wait = _Wait()
        self._lost: tuple[int, float] | None = None
        self._circle: Circle | None = None
        self._silence = Silence()
        self._started = self._beat_at = self._read_at = time.monotonic()
        self._store_silence, self._ticked = 0.0, time.monotonic()
        self._ask_seconds = TICK_SECONDS * max(1.0, len(self._board.ranks) / RANKS_PER_TICK)
        self._asked = 0.0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """End, within ``seconds`` if the store answers."""
        self._ended.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            try:
                self._tick(time.monotonic())
            except UnansweredError:
                pass
            except Exception:  # without this thread, this rank would learn of no failure of others
                logger.exception("the search for deadlocked ranks failed and will be repeated")

    def _tick(self, now: float) -> None:
        alarm = self._alarm
        # Seconds that this process itself stood still say nothing about the store.
        is_silent = alarm.courier.silence(now) > PATIENCE_SECONDS
        passed, self._ticked = min(now - self._ticked, MOST_SECONDS), now
        self._store_silence = self._store_silence + passed if is_silent else 0.0
        self._beat(now)
        if alarm.report is not None:
            self._wait = self._wait.at(None, now)
            self._look_elsewhere(now)
            return
        if is_silent and self._main.is_in_torch():
            self._suspect_store()
        waiting = alarm.waiting or self._elsewhere()
        before, self._wait = self._wait, self._wait.at(waiting, now)
        if waiting is None or now - self._wait.since < PATIENCE_SECONDS:
            if before.beats[0]:
                self._take_back()
            return
        self._look(waiting, now)

    def _elsewhere(self) -> _Elsewhere | None:
        """What the main thread waits for outside of the engine. See [Note: waits for a device]."""
        if on_devices():
            return _Elsewhere(tuple(self._alarm.expected(self._board.ranks)), self._alarm.parts)
        return self._main.elsewhere(self._board.ranks)

    # A long wait ------------------------------------------------------------------------------

    def _look(self, waiting: Waiting, now: float) -> None:
        alarm, register = self._alarm, self._alarm.register
        peers, place = waiting.peers(), waiting.place()
        alarm.look_at_processes(register.near(peers))
        is_elsewhere = isinstance(waiting, _Elsewhere)
        if alarm.report or is_elsewhere or now - self._asked < self._ask_seconds:
            return
        self._asked = now
        epoch = alarm.epoch
        try:
            register.read_host()
            alarm.look_at_processes(peers)
            if place is not None:
                at = self._wait.position(*place, alarm.posted(), f"is at {alarm.doing}")
                among = peers if place[0] == NOBODY else ()
                self._post(replace(at, epoch=epoch, among=among))
                others = [rank for rank in among if rank != self._board.rank] or [NOBODY]
                self._look_for_circle(epoch, others[(at.beat - 1) % len(others)])
            for rank in register.beside - (alarm.away - {*peers}):
                silent = register.silent(rank, self._silence, now)
                if silent is not None:
                    alarm.ring(silent)
        except UnansweredError:
            self._suspect_store()
            raise

    def _post(self, own: Position) -> None:
        key = self._board.key("at", self._board.rank)
        self._alarm.courier.ask(lambda store: store.set(key, own.encode()), ANSWER_SECONDS)

    def _take_back(self) -> None:
        key = self._board.key("at", self._board.rank)
        self._alarm.courier.tell(lambda store: store.set(key, ""))

    def _look_for_circle(self, epoch: int, candidate: int) -> None:
        """Among ranks that gave their place in this ``epoch``: those of an earlier one have left.

        Other ranks may have ended the epoch meanwhile, and this one entered the next.
        """
        find = partial(self._find, epoch)
        circle, self._circle = self._circle, None
        stands = circle is not None and circle.still_stands(find)
        if circle is not None and stands:
            self._alarm.ring(Report(NOBODY, Cause.APART, circle.describe()), epoch)
        elif stands is None:
            self._circle = circle
        else:
            self._circle = circle_from(self._board.rank, find, candidate)

    def _find(self, epoch: int, rank: int) -> Position | None:
        key = self._board.key("at", rank)
        text = self._alarm.courier.ask(lambda store: look(store, key), ANSWER_SECONDS)
        at = Position.decode(text) if text else None
        return at if at is not None and at.epoch == epoch else None

    # Other hosts ------------------------------------------------------------------------------

    def _beat(self, now: float) -> None:
        register = self._alarm.register
        if now >= self._read_at:  # all have entered by the first forward; later no store may answer
            self._read_at = (
                math.inf if self._alarm.turns else 2 * now - self._started + TICK_SECONDS
            )
            register.read_host()
        if now >= self._beat_at:
            self._beat_at = now + register.pulse_seconds
            if register.is_heard_elsewhere:
                register.pulse()

    def _suspect_store(self) -> None:
        """The store does not answer: the process that keeps it may be a rank's."""
        alarm = self._alarm
        alarm.look_at_processes(alarm.register.near(alarm.expected(self._board.ranks)))
        if alarm.report is None and self._store_silence > SILENCE_SECONDS:
            text = (
                f"the store of the process group has not answered rank {self._board.rank} for "
                f"{SILENCE_SECONDS:.0f} s: the process that keeps it was stopped, or its host is "
                "down or cut off"
            )
            alarm.ring(Report(NOBODY, Cause.GONE, text))

    # Elsewhere --------------------------------------------------------------------------------

    def _look_elsewhere(self, now: float) -> None:
        """See [Note: waits elsewhere]."""
        alarm = self._alarm
        if alarm.is_seen:
            return
        if self._lost is None or self._lost[0] != alarm.epoch:
            self._lost = (alarm.epoch, now)
        is_stuck = now - self._lost[1] > ELSEWHERE_SECONDS and self._main.is_in_torch()
        if is_stuck:
            alarm.cut_elsewhere(self._lost[0], cut_groups)


@dataclass(frozen=True)
class _Wait:
    """What the main thread waits for, and since when."""

    waiting: Waiting | None = None
    since: float = 0.0
    number: int = 0
    beats: list[int] = field(default_factory=lambda: [0])

    def at(self, waiting: Waiting | None, now: float) -> _Wait:
        """The same, or what begins at ``now``."""
        if waiting == self.waiting:
            return self
        return _Wait(waiting, now, self.number + 1)

    def position(
        self, peer: int, key: str, count: int, posted: dict[str, int], says: str
    ) -> Position:
        """As others are told of it."""
        self.beats[0] += 1
        return Position(self.number, self.beats[0], peer, key, count, posted, says)


@dataclass(frozen=True)
class _Elsewhere:
    """A wait in a collective of torch's or for a device, for some ranks."""

    ranks: tuple[int, ...]
    parts: int = 0
    """How many parts of steps had been begun before."""

    def peers(self) -> tuple[int, ...]:
        """See :class:`polyshard_resilience.alarm.alarm.Waiting`."""
        return self.ranks

    def place(self) -> None:
        """See there: others cannot know."""


class _Thread:
    """The thread that made it, seen from another. See [Note: looking at a thread]."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._ident)
        self._used = -1.0

    def elsewhere(self, every: tuple[int, ...]) -> _Elsewhere | None:
        """What it waits for in torch; ``None`` if its frame does not show which group."""
        frame = self._frame_in_torch() if self._is_still() else None
        if frame is None or "group" not in frame.f_code.co_varnames:
            return None
        group = frame.f_locals.get("group")
        if isinstance(group, dist.ProcessGroup):
            with suppress(ValueError, KeyError):  # being destroyed, or not of this process
                return _Elsewhere(tuple(dist.get_process_group_ranks(group)))
        return _Elsewhere(every) if group is None else None

    def is_in_torch(self) -> bool:
        """Whether it is in a collective of torch's: not in what ``DTensor`` computes."""
        return self._frame_in_torch() is not None

    def _is_still(self) -> bool:
        """Whether it has used no processor time since this was last asked."""
        try:
            used = time.clock_gettime(self._clock)
        except OSError:  # it has ended
            return False
        before, self._used = self._used, used
        return used == before

    def _frame_in_torch(self) -> FrameType | None:
        """The innermost frame of a collective's file, if it is one of the first few."""
        frame = sys._current_frames().get(self._ident)
        for _ in range(FRAMES):
            if frame is None or frame.f_code.co_filename in COLLECTIVES:
                return frame
            frame = frame.f_back
        return None
