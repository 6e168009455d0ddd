"""Connections between some ranks: the engine's own, so that they can be cut and made anew.

[Note: wires]
Transfers over gloo do not use the process group that a mesh brings: what ends a transfer under way
there ends the group for good (see [Note: cutting] of ``_torch_private.py``), with everything else
that its owner does with it. A wire is a set of connections of the same ranks, made at its first
use; groups that communicate among the same ranks share it. When the alarm rings it is cut, and in
the next epoch it is made anew, as soon as all of its ranks have come.

[Note: stranded messages]
When gloo closes a connection it tells the messages that wait for their turn, and forgets those that
are half way through it: of which the header was read and the rest was not, or that fill a socket
from which no rank reads. A thread that waits for such a message does so until the time-out, and
Python cannot end that. So the main thread never waits for a message: another thread does. When
connections are cut that thread is left behind with what it waits for: it keeps the memory alive
that the message was to be written to or read from, and ends with the time-out. The next wait gets a
new one.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from typing_extensions import override

from polyshard._torch.private import timeout_of
from polyshard.errors import ConnectionLostError
from polyshard.transport.gloo.messages import COLLECTIVE
from polyshard.transport.gloo.wire import Job, Transfer, Wire
from polyshard_resilience._torch_private import connect_gloo, cut_gloo, forget_gloo
from polyshard_resilience.alarm.alarm import Alarm

REMEMBERED = 4096
"""Transfers that a rank remembers to have begun, for ranks that wait for it."""
PATIENCE_SECONDS = 0.1
"""How long a rank waits for another to connect before it looks whether that one is there."""
POLL_SECONDS = 0.002
MOST_SECONDS = 0.05
"""How often a rank that waits for connections looks whether all have come."""


LOOK_SECONDS = 0.05
"""How often the main thread looks whether connections were cut."""

T = TypeVar("T")


class Waited(Protocol):
    """What a thread waits for, as a :class:`~polyshard.transport.gloo.wire.Job` is."""

    is_left: bool

    def run(self) -> None:
        """Return when it is done."""
        ...


@dataclass
class _Held:
    """A job that a thread waits for."""

    job: Waited
    error: RuntimeError | None = None
    done: Lock = field(default_factory=Lock)
    """Held from the begin of a wait until all is done."""

    def run(self) -> None:
        """In the thread that waits."""
        try:
            self.job.run()
        except RuntimeError as error:
            self.error = error
        finally:
            if self.done.locked():
                self.done.release()


class Waiter:
    """See [Note: stranded messages]."""

    def __init__(self) -> None:
        """There is no thread yet."""
        self._jobs: SimpleQueue[_Held | None] | None = None

    def wait(self, job: Waited, is_cut: Callable[[], bool]) -> None:
        """Return when ``job`` is done.

        Raises:
            RuntimeError: what gloo raised.
            ConnectionLostError: when it was left behind, because of a cut.
        """
        jobs = self._jobs
        if jobs is None:
            jobs = self._jobs = SimpleQueue()
            Thread(target=_work, args=(jobs,), name="polyshard-wait", daemon=True).start()
            weakref.finalize(self, jobs.put, None).atexit = False
        held = _Held(job)
        held.done.acquire()
        was_cut = False
        try:
            jobs.put(held)
            while not held.done.acquire(timeout=LOOK_SECONDS):
                if was_cut:
                    raise ConnectionLostError("connections were cut")
                was_cut = is_cut()
        except BaseException:  # an interrupt too: the next wait is not to queue behind this one
            job.is_left, self._jobs = True, None
            raise
        if held.error is not None:
            raise held.error


def _work(jobs: SimpleQueue[_Held | None]) -> None:
    """Until a job is left behind, or no caller is left to bring one."""
    while (held := jobs.get()) is not None:
        held.run()
        if held.job.is_left:
            return
        del held  # what it keeps alive is not needed while the next one is waited for


class _Begun(NamedTuple):
    """One transfer."""

    number: int
    """Among all."""
    tag: int
    nth: int
    """Among those of its tag."""


@dataclass
class Wait:
    """What the main thread waits for in a transfer; see ``alarm.Waiting``."""

    wire: WatchedWire
    transfer: Transfer
    asked: int = 0

    def peers(self) -> tuple[int, ...]:
        """See there."""
        if self.transfer.tag == COLLECTIVE:
            return self.wire.ranks
        place = self.place()
        return () if place is None else (place[0],)

    def place(self) -> tuple[int, str, int] | None:
        """See there: in a collective, another of the ranks at every call."""
        wire, tag = self.wire, self.transfer.tag
        if tag == COLLECTIVE:
            others = wire.others()
            self.asked += 1
            rank = others[self.asked % len(others)] if others else None
        else:
            rank = wire.rank_of(self.transfer.peer())
        if rank is None:
            return None
        return rank, wire.key(tag), wire.count(self.transfer.number)


class WatchedWire(Wire):
    """See [Note: wires]."""

    def __init__(
        self, group: dist.ProcessGroup, alarm: Alarm, ranks: tuple[int, ...], name: str = ""
    ) -> None:
        """For these ranks of ``group``, which runs on gloo; nothing is connected yet.

        A ``name`` tells apart wires of the same ranks; they are for groups, and share a device of
        gloo.
        """
        self.alarm = alarm
        self.ranks = ranks
        self.name = f"{zlib.crc32(repr((*self.ranks, name)).encode()):08x}"
        self._is_named = bool(name)
        self._begun: deque[_Begun] = deque(maxlen=REMEMBERED)
        self._total = 0
        self._counts: dict[int, int] = {}
        """How many of each tag, since the epoch's begin: ranks that compare them do not all
        remember the same transfers."""
        # Not the group itself: it would outlive its destruction here, with its threads and files.
        self._timeout = timeout_of(group)
        self.connections = None
        self._cut: dist.ProcessGroup | None = None
        self._waiter = Waiter()
        self._left: list[str] = []
        """Names of connections whose keys this rank has in the store."""

    @override
    def open(self) -> dist.ProcessGroup:
        connections = self.connections
        return self._connect() if connections is None else connections

    @override
    def begin(self, tag: int) -> int:
        if (
            len(self._begun) == REMEMBERED
            and self._begun[0].nth == self._counts[self._begun[0].tag]
        ):
            del self._counts[self._begun[0].tag]  # long ago, of a model that is gone
        self._total += 1
        self._counts[tag] = self._counts.get(tag, 0) + 1
        self._begun.append(_Begun(self._total, tag, self._counts[tag]))
        return self._total

    def count(self, number: int) -> int:
        """The place of this transfer among those of its tag, from 1; 0 if forgotten."""
        return next((each.nth for each in list(self._begun) if each.number == number), 0)

    @override
    def rank_of(self, peer: int | None) -> int | None:
        return None if peer is None else self.ranks[peer]

    @override
    def number_of(self, rank: int) -> int:
        return self.ranks.index(rank)

    def others(self) -> tuple[int, ...]:
        """The global ranks that are not this one."""
        return tuple(rank for rank in self.ranks if rank != self.alarm.rank)

    def cut(self) -> None:
        """End all transfers; the next ones are refused."""
        connections = self.connections
        if connections is not None:
            cut_gloo(connections)
            self._cut = connections

    @override
    def wait(self, job: Job, connections: dist.ProcessGroup | None, transfer: Transfer) -> None:
        if self.alarm.away:
            self.alarm.expect(self.ranks)
        self.alarm.waiting = Wait(self, transfer)
        try:
            self._waiter.wait(job, lambda: self.is_over(connections))
        finally:
            self.alarm.waiting = None

    @override
    def is_over(self, connections: dist.ProcessGroup | None) -> bool:
        return connections is not self.connections or connections is self._cut

    def renew(self) -> None:
        """Connect anew at the next use."""
        self.connections = None
        self._begun.clear()
        self._counts.clear()
        self._total = 0

    def posted(self) -> dict[str, int]:
        """How many transfers of each tag this rank has begun."""
        return {self.key(each.tag): each.nth for each in list(self._begun)}

    def key(self, tag: int) -> str:
        """Of transfers with ``tag``, among those of all wires."""
        return f"{self.name}:{tag}"

    def _connect(self) -> dist.ProcessGroup:
        rank, size, timeout = self.number_of(self.alarm.rank), len(self.ranks), self._timeout
        made = self._made(
            lambda store, name: connect_gloo(
                store, name, rank, size, timeout, on_shared_device=self._is_named
            )
        )
        self.connections = made
        if self.alarm.report is not None:  # rung while this was made, and cut nothing
            self.cut()
        return made

    def make(self, maker: Callable[[dist.Store], T]) -> T:
        """What ``maker`` makes over a part of the store, once all ranks have come to this.

        Raises:
            ConnectionLostError: as :meth:`open`.
        """
        return self._made(lambda store, name: maker(dist.PrefixStore(name, store)))

    def _made(self, connect: Callable[[dist.Store, str], T]) -> T:
        board, epoch = self.alarm.board, self.alarm.epoch
        assert board is not None
        name = f"{board.prefix}/wires/{self.name}/{epoch}"
        try:
            self._meet(board.store, name, self._timeout.total_seconds())
        except ConnectionLostError:  # the epoch is over: no rank looks for this one there
            here = f"{self._left.pop()}/{self.alarm.rank}"
            self.alarm.courier.tell(lambda store: store.delete_key(here))
            raise
        made = self._patiently(lambda: connect(board.store, f"{name}/gloo"))
        self._tidy(board.store, name, self.number_of(board.rank))
        return made

    def _patiently(self, connect: Callable[[], T]) -> T:
        """What ``connect`` returns, unless a rank that had come goes before it has connected.

        gloo waits for that rank until its time-out. So it is left to do so, in another thread.
        """
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(connect())
            except BaseException as error:
                future.set_exception(error)

        Thread(target=work, name="polyshard-connect", daemon=True).start()
        begin = time.monotonic()
        while not wait((future,), MOST_SECONDS).done:
            if time.monotonic() - begin > PATIENCE_SECONDS:
                self.alarm.look_at_processes(self.others())
            if self.alarm.report is not None:
                raise _lost(None, "another failure came first")
        try:
            return future.result()
        except RuntimeError as error:
            raise _lost(None, str(error)) from error

    def _tidy(self, store: dist.Store, name: str, rank: int) -> None:
        """Take back what this rank left for earlier connections: all ranks have left them."""
        for left in self._left[:-1]:
            store.delete_key(f"{left}/{self.ranks[rank]}")
            forget_gloo(store, f"{left}/gloo", rank)
        self._left = [name]

    def _meet(self, store: dist.Store, name: str, seconds: float) -> None:
        """Return when all ranks have come to make the same connections."""
        alarm, own = self.alarm, self.alarm.rank
        store.set(f"{name}/{own}", "here")
        self._left.append(name)
        missing = [rank for rank in self.ranks if rank != own]
        begin, pause = time.monotonic(), POLL_SECONDS
        while missing:
            if store.check([f"{name}/{missing[0]}"]):
                missing.pop(0)
                continue
            alarm.look_for_gone(missing)
            waited = time.monotonic() - begin
            if waited > PATIENCE_SECONDS:
                alarm.look_at_processes((missing[0],))
            if alarm.report is not None:
                raise _lost(missing[0], "another failure came first")
            if waited > seconds:
                raise _lost(missing[0], f"timed out after {seconds:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, MOST_SECONDS)


def _lost(peer: int | None, words: str) -> ConnectionLostError:
    error = ConnectionLostError(f"no connection to rank {peer}: {words}")
    error.peer = peer
    return error
