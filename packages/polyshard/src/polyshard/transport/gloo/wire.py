"""Connections between some ranks: the engine's own, so that they can be cut and made anew.

[Note: wires]
Transfers over gloo do not use the process group that a mesh brings: what ends a transfer under way
there ends the group for good (see [Note: cutting] of ``_torch/gloo.py``), with all that its owner
does with it. A wire is a set of connections of the same ranks, made at its first use; groups that
communicate among the same ranks share it. When the alarm rings it is cut, and in the next epoch it
is made anew, as soon as all of its ranks have come.

Without a store that ranks share (one process in a test, torch's fake group) there is no alarm, and
transfers go through the process group itself.

[Note: stranded messages]
When gloo closes a connection it tells the messages that wait for their turn, and forgets those that
are half way through it: of which the header was read and the rest was not, or that fill a socket
which nobody reads. Whoever waits for such a message waits until the time-out, and Python cannot
end that. So the main thread never waits for a message itself. A thread does, and when connections
are cut it is left behind with what it waits for: it keeps the memory alive that the message was to
be written to or read from, and ends with the time-out. The next wait gets a new one.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple, cast

import torch.distributed as dist

from polyshard._torch.gloo import connect_gloo, cut_gloo, forget_gloo, timeout_of
from polyshard.alarm.alarm import Alarm
from polyshard.alarm.current import current_alarm
from polyshard.errors import ConnectionLostError

REMEMBERED = 4096
"""Transfers that a rank remembers to have begun, for ranks that wait for it."""
PATIENCE_SECONDS = 0.3
"""How long a rank waits for another to connect before it looks whether that one is there."""
POLL_SECONDS = 0.002
MOST_SECONDS = 0.05
"""How often a rank that waits for connections looks whether all have come."""


LOOK_SECONDS = 0.05
"""How often the main thread looks whether connections were cut."""


@dataclass
class Job:
    """Works to wait for, one after the other, until one fails."""

    works: Sequence[dist.Work]
    keep: object
    """What must live until they are done."""
    at: int = 0
    """Of the work that is waited for."""
    error: RuntimeError | None = None
    is_left: bool = False
    """Whether nobody waits for it any more."""
    done: Lock = field(default_factory=Lock)
    """Held from when somebody waits until all is done."""

    def run(self) -> None:
        """In the thread that waits."""
        try:
            for self.at, work in enumerate(self.works):  # noqa: B020
                work.wait()
        except RuntimeError as error:
            self.error = error
        finally:
            if self.done.locked():
                self.done.release()


class Waiter:
    """See [Note: stranded messages]."""

    def __init__(self) -> None:
        """There is no thread yet."""
        self._jobs: SimpleQueue[Job | None] | None = None

    def wait(self, job: Job, is_cut: Callable[[], bool]) -> bool:
        """Return when ``job`` is done; ``False`` if it was left behind, because of a cut."""
        jobs = self._jobs
        if jobs is None:
            jobs = self._jobs = SimpleQueue()
            Thread(target=_work, args=(jobs,), name="polyshard-wait", daemon=True).start()
            weakref.finalize(self, jobs.put, None).atexit = False
        job.done.acquire()
        jobs.put(job)
        was_cut = False
        while not job.done.acquire(timeout=LOOK_SECONDS):
            if was_cut:
                job.is_left, self._jobs = True, None
                return False
            was_cut = is_cut()
        return True


def _work(jobs: SimpleQueue[Job | None]) -> None:
    """Until a job is left behind, or nobody is there to bring one."""
    while (job := jobs.get()) is not None:
        job.run()
        if job.is_left:
            return
        del job  # what it keeps alive is not needed while the next one is waited for


class _Begun(NamedTuple):
    """One transfer."""

    number: int
    """Among all."""
    tag: int
    nth: int
    """Among those of its tag."""


class Wire:
    """See [Note: wires]."""

    def __init__(
        self, group: dist.ProcessGroup, alarm: Alarm, ranks: tuple[int, ...], name: str = ""
    ) -> None:
        """For these ranks of ``group``, which runs on gloo; nothing is connected yet.

        Without an alarm all ranks of the group are connected, whatever ``ranks`` says. A ``name``
        tells apart wires of the same ranks; they are for groups, and share a device of gloo.
        """
        self.alarm = alarm
        self.ranks = ranks if alarm.board else ()
        self.name = f"{zlib.crc32(repr((*self.ranks, name)).encode()):08x}"
        self._is_named = bool(name)
        self._begun: deque[_Begun] = deque(maxlen=REMEMBERED)
        self._total = 0
        self._counts: dict[int, int] = {}
        """How many of each tag, since the epoch's begin: ranks that compare them do not all
        remember the same transfers."""
        # Not the group itself: it would outlive its destruction here, with its threads and files.
        self._timeout = timeout_of(group)
        self._unwatched = None if alarm.board else group
        self.connections = self._unwatched
        """What sends and receives, once it is connected."""
        self._cut: dist.ProcessGroup | None = None
        self.waiter = Waiter()
        self._left: list[str] = []
        """Names of connections whose keys this rank has in the store."""

    def open(self) -> dist.ProcessGroup:
        """What sends and receives; connected if need be.

        Raises:
            ConnectionLostError: when a rank is gone, or another failure ends the wait for it.
        """
        connections = self.connections
        return self._connect() if connections is None else connections

    def begin(self, tag: int) -> int:
        """A transfer of ``tag`` begins; its number among all."""
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
        """The how-manieth of its tag the transfer with this number is; 0 if forgotten."""
        return next((each.nth for each in list(self._begun) if each.number == number), 0)

    def rank_of(self, peer: int | None) -> int | None:
        """The global rank of the ``peer``-th of this wire."""
        return None if peer is None or not self.ranks else self.ranks[peer]

    def number_of(self, rank: int) -> int:
        """What a global rank is called in messages over this wire."""
        group = self._unwatched
        return self.ranks.index(rank) if group is None else dist.get_group_rank(group, rank)

    def others(self) -> tuple[int, ...]:
        """The global ranks that are not this one."""
        return tuple(rank for rank in self.ranks if rank != self.alarm.rank)

    def cut(self) -> None:
        """End all transfers; the next ones are refused."""
        connections = self.connections
        if connections is not None:
            cut_gloo(connections)
            self._cut = connections

    def is_over(self, connections: dist.ProcessGroup | None) -> bool:
        """Whether nothing goes over ``connections`` any more, which :meth:`open` returned."""
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
        board, epoch = self.alarm.board, self.alarm.epoch
        assert board is not None
        name = f"{board.prefix}/wires/{self.name}/{epoch}"
        timeout = self._timeout
        try:
            self._meet(board.store, name, timeout.total_seconds())
        except ConnectionLostError:  # the epoch is over: nobody looks for this rank there
            here = f"{self._left.pop()}/{self.alarm.rank}"
            self.alarm.courier.tell(lambda store: store.delete_key(here))
            raise
        rank, size = self.ranks.index(board.rank), len(self.ranks)
        made = self._patiently(
            lambda: connect_gloo(
                board.store, f"{name}/gloo", rank, size, timeout, on_shared_device=self._is_named
            )
        )
        self.connections = made
        self._tidy(board.store, name, rank)
        if self.alarm.report is not None:  # rung while this was made, and cut nothing
            self.cut()
        return made

    def _patiently(self, connect: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
        """What ``connect`` returns, unless a rank that had come goes before it has connected.

        gloo waits for that rank until its time-out. So it is left to do so, in another thread.
        """
        future: Future[dist.ProcessGroup] = Future()

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
        """Take back what this rank left for earlier connections: all ranks have gone on."""
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


def wire_of(group: dist.ProcessGroup, among: Sequence[int] | None = None) -> Wire:
    """The wire among some ranks of ``group``, or all of them; shared by all who ask for it.

    Args:
        group: Of processes that can connect over gloo.
        among: Global ranks in ascending order. Each of them uses the wire, and nobody else: the
            first transfer waits until they all have come.
    """
    alarm = current_alarm()
    ranks = tuple(dist.get_process_group_ranks(group) if among is None else among)
    if alarm.board is None:
        return Wire(group, alarm, ranks)
    known = alarm.connections.get(ranks)
    if known is None:
        known = alarm.connections.setdefault(ranks, Wire(group, alarm, ranks))
    return cast("Wire", known)
