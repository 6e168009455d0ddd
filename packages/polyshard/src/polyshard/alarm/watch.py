"""The thread that watches how long this rank waits, and for whom. See [Note: alarm].

A rank that waits for more than a moment looks at the process it waits for (gone, stopped), tells
the others where it is, and looks for a circle (see [Note: ranks apart]). One on another host is
given up when its pulse stops for :data:`SILENCE_SECONDS`. Nothing is done while nobody waits, but
for that pulse.

[Note: waits elsewhere]
A rank may also wait in a collective of somebody else's (a sum of losses, activations of tensor
parallelism) when the step is lost, and its peers never come. Those process groups are not the
engine's to break, and ranks that have all raised may need them to agree on what to do. So they are
cut, as the last resort, only by a rank that has not raised :data:`ELSEWHERE_SECONDS` after the
report and still stands in ``torch.distributed``. ``reset_iter_state()`` mends them (see
[Note: mending] of ``transport/mending.py``).
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from polyshard._torch.gloo import COLLECTIVES, cut_groups
from polyshard.alarm.alarm import Alarm, Waiting
from polyshard.alarm.board import look
from polyshard.alarm.courier import ANSWER_SECONDS, UnansweredError
from polyshard.alarm.positions import Circle, Position, circle_from
from polyshard.alarm.processes import Condition, Process
from polyshard.alarm.reports import NOBODY, Cause, Report

TICK_SECONDS = 0.1
PATIENCE_SECONDS = 0.3
"""How long a wait is nobody's business."""
PULSE_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""How long a rank of another host may be silent while somebody waits for it."""
ELSEWHERE_SECONDS = 0.4
"""How long a rank that heard of a report may take to leave ``torch.distributed``."""
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
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="polyshard-watch", daemon=True)
        self._wait = _Wait()
        self._lost: tuple[int, float] | None = None
        self._circle: Circle | None = None
        self._pulse = _Pulse()
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
            with suppress(UnansweredError):
                self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        alarm = self._alarm
        self._beat(now)
        if alarm.report is not None:
            self._wait = self._wait.at(None, now)
            self._look_elsewhere(now)
            return
        if alarm.courier.silence(now) > PATIENCE_SECONDS and _is_in_torch(self._main):
            self._suspect_store(now)
        waiting = alarm.waiting
        before, self._wait = self._wait, self._wait.at(waiting, now)
        if waiting is None or now - self._wait.since < PATIENCE_SECONDS:
            if before.beats[0]:
                self._take_back()
            return
        self._look(waiting, now)

    # A long wait ------------------------------------------------------------------------------

    def _look(self, waiting: Waiting, now: float) -> None:
        peers, place = waiting.peers(), waiting.place()
        self._alarm.look_at_processes(peers)
        if self._alarm.report is not None or now - self._asked < self._ask_seconds:
            return
        self._asked = now
        epoch = self._alarm.epoch
        try:
            if place is not None:
                at = self._wait.position(*place, f"is at {self._alarm.doing}")
                self._post(replace(at, epoch=epoch))
                self._look_for_circle(epoch)
            for peer in peers:
                self._listen(peer, now)
        except UnansweredError:
            self._suspect_store(now)
            raise

    def _post(self, own: Position) -> None:
        key = self._board.key("at", self._board.rank)
        self._alarm.courier.ask(lambda store: store.set(key, own.encode()), ANSWER_SECONDS)

    def _take_back(self) -> None:
        key = self._board.key("at", self._board.rank)
        self._alarm.courier.tell(lambda store: store.set(key, ""))

    def _look_for_circle(self, epoch: int) -> None:
        """In which ranks stand that said so in this ``epoch``: those of an earlier one have left.

        Other ranks may have ended the epoch meanwhile, and this one gone on to the next.
        """
        find = partial(self._find, epoch)
        circle, self._circle = self._circle, None
        stands = circle is not None and circle.still_stands(find)
        if circle is not None and stands:
            self._alarm.ring(Report(NOBODY, Cause.APART, circle.describe()), epoch)
        elif stands is None:
            self._circle = circle
        else:
            self._circle = circle_from(self._board.rank, find)

    def _find(self, epoch: int, rank: int) -> Position | None:
        key = self._board.key("at", rank)
        text = self._alarm.courier.ask(lambda store: look(store, key), ANSWER_SECONDS)
        at = Position.decode(text) if text else None
        return at if at is not None and at.epoch == epoch else None

    # Other hosts ------------------------------------------------------------------------------

    def _beat(self, now: float) -> None:
        if now - self._pulse.own < PULSE_SECONDS:
            return
        self._pulse.own = now
        alarm, key = self._alarm, self._board.key("pulse", self._board.rank)
        if len({p.host for p in self._everybody().values()}) > 1:
            alarm.courier.tell(lambda store: store.add(key, 1))

    def _everybody(self) -> dict[int, Process]:
        """All processes that have introduced themselves: later, the store may not answer."""
        register = self._alarm.register
        for rank in self._board.ranks:
            if register.process_of(rank) is None:
                break
        return register.known

    def _listen(self, peer: int, now: float) -> None:
        """Give up a ``peer`` that can be seen nowhere else, when it falls silent."""
        register = self._alarm.register
        process = register.process_of(peer)
        if process is None or process.condition() is not Condition.ELSEWHERE:
            return
        if self._pulse.silence(peer, register.pulse_of(peer), now) > SILENCE_SECONDS:
            text = (
                f"rank {peer} ({process}) has not been heard of for {SILENCE_SECONDS:.0f} s: it "
                "was stopped, or its host is down or cut off"
            )
            self._alarm.ring(Report(peer, Cause.GONE, text))

    def _suspect_store(self, now: float) -> None:
        """Whoever keeps the store does not answer."""
        self._alarm.look_at_processes(self._board.ranks)
        if self._alarm.report is None and self._pulse.silence(NOBODY, 0, now) > SILENCE_SECONDS:
            text = (
                f"the store of the process group has not answered rank {self._board.rank} for "
                f"{SILENCE_SECONDS:.0f} s: the process that keeps it was stopped, or its host is "
                "down or cut off"
            )
            self._alarm.ring(Report(NOBODY, Cause.GONE, text))

    # Elsewhere --------------------------------------------------------------------------------

    def _look_elsewhere(self, now: float) -> None:
        """See [Note: waits elsewhere]."""
        alarm = self._alarm
        if alarm.is_seen:
            return
        if self._lost is None or self._lost[0] != alarm.epoch:
            self._lost = (alarm.epoch, now)
        is_stuck = now - self._lost[1] > ELSEWHERE_SECONDS and _is_in_torch(self._main)
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
        if waiting is self.waiting:
            return self
        return _Wait(waiting, now, self.number + 1)

    def position(self, peer: int, key: str, count: int, says: str) -> Position:
        """As others are told of it."""
        assert self.waiting is not None
        self.beats[0] += 1
        posted = self.waiting.posted()
        return Position(self.number, self.beats[0], peer, key, count, posted, says)


@dataclass
class _Pulse:
    """When this rank showed that it lives, and others did."""

    own: float = 0.0
    heard: dict[int, tuple[int, float]] = field(default_factory=dict)

    def silence(self, rank: int, number: int, now: float) -> float:
        """Seconds since the pulse of ``rank`` changed, as far as somebody listened."""
        before, since = self.heard.get(rank, (number, now))
        if number != before:
            since = now
        self.heard[rank] = (number, since)
        return now - since


def _is_in_torch(thread: int) -> bool:
    """Whether ``thread`` stands in a collective of torch's: not in what ``DTensor`` computes."""
    frame = sys._current_frames().get(thread)
    for _ in range(FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename in COLLECTIVES:
            return True
        frame = frame.f_back
    return False
