"""Messages in flight over a wire."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

import torch.distributed as dist
from torch import Tensor

from polyshard._torch.gloo import gather_options
from polyshard.errors import ConnectionLostError
from polyshard.transport.gloo.wire import Job, Wire

COLLECTIVE = -1
"""What collectives of a wire have for a tag: they pair by order."""


@dataclass(frozen=True)
class Message:
    """Something that comes from, or goes to, the ``peer``-th rank of a wire."""

    tensors: list[Tensor]
    peer: int


class Works:
    """Messages of one transfer, with what keeps their memory alive."""

    def __init__(
        self, wire: Wire, tag: int, keep: object = None, number: int | None = None
    ) -> None:
        """Begin a transfer; ``keep`` is held until it ends.

        Args:
            wire: what messages go over.
            tag: of all of them.
            keep: with the memory of messages.
            number: of a transfer that is continued; by default another one begins. All ranks
                count transfers alike: a rank that waits is told how many others have begun.
        """
        self._wire, self.tag, self._keep = wire, tag, keep
        self.number = wire.begin(tag) if number is None else number
        self._works: list[dist.Work] = []
        self._peers: list[Sequence[Message]] = []
        self._connections: dist.ProcessGroup | None = None
        self._job: Job | None = None
        self._next = 0

    def __del__(self) -> None:
        """Let messages arrive that are not awaited (the model was dropped): peers count on it.

        gloo forgets messages whose work is gone, and the next of the tag would be taken for them.
        """
        if self._works and not sys.is_finalizing() and not self._wire.is_over(self._connections):
            job = Job(self._works[self._next :], (self._keep, tuple(self._peers)))
            Thread(target=_arrive, args=(job,), name="polyshard-dropped", daemon=True).start()

    def post(self, what: str, messages: Sequence[Message]) -> None:
        """Post receives (``"recv"``) or sends (``"send"``).

        Raises:
            ConnectionLostError: when the connections were cut.
        """
        connections = self._wire.connections
        self._connections = connections = connections or self._wire.open()
        post, tag, works = getattr(connections, what), self.tag, self._works
        self._peers.append(messages)
        try:
            for message in messages:  # a loop: everything here runs in every transfer
                works.append(post(message.tensors, message.peer, tag))
        except RuntimeError as error:
            raise lost(error, None) from error

    def wait(self) -> None:
        """Wait in the order they were posted in.

        Each is waited for once: gloo would wait for another message that completes it. So after an
        error the next call waits for those that were not reached.

        Raises:
            ConnectionLostError: when one of them ended before it was complete.
        """
        wire, connections = self._wire, self._connections
        job = self._job = Job(self._works[self._next :], (self._keep, tuple(self._peers)))
        try:
            wire.wait(job, connections, self)
        except RuntimeError as error:
            peer = wire.rank_of(self.peer())
            self._next += job.at + 1
            raise lost(error, peer) from error
        finally:
            if job.is_left:
                self._works = []  # nothing of it will move again
        self._works.clear()
        self._peers.clear()
        self._job, self._next = None, 0
        self._keep = None

    def peer(self) -> int | None:
        """The rank of the wire whose message is waited for; ``None`` when it has just ended."""
        job = self._job
        at = self._next + (0 if job is None else job.at)
        every = [message.peer for messages in tuple(self._peers) for message in messages]
        return every[at] if at < len(every) else None


class Collective:
    """A collective in flight over a wire; which rank keeps it waiting is not known."""

    def __init__(
        self, wire: Wire, connections: dist.ProcessGroup, work: dist.Work, keep: object
    ) -> None:
        """``work`` goes over ``connections`` of ``wire``; ``keep`` is held until it ends."""
        self._wire, self._connections = wire, connections
        self._work: dist.Work | None = work
        self._keep = keep
        self.tag, self.number = COLLECTIVE, wire.begin(COLLECTIVE)

    def wait(self) -> None:
        """Wait for all of it.

        Raises:
            ConnectionLostError: when it ended before it was complete.
        """
        assert self._work is not None
        try:
            self._wire.wait(Job([self._work], self._keep), self._connections, self)
        except RuntimeError as error:
            raise lost(error, None) from error
        self._work = self._keep = None

    def peer(self) -> None:
        """Any rank may keep it waiting."""


def _arrive(job: Job) -> None:
    with suppress(RuntimeError):
        job.run()


def _begun(wire: Wire, begin: Callable[[dist.ProcessGroup], dist.Work], keep: object) -> Collective:
    """What ``begin`` starts over the connections of ``wire``; ``keep`` is held until it ends."""
    try:
        connections = wire.open()
        work = begin(connections)
    except RuntimeError as error:
        raise lost(error, None) from error
    return Collective(wire, connections, work, keep)


def exchange_over(wire: Wire, payloads: Tensor, received: Tensor) -> Collective:
    """All-to-all of equal rows.

    Raises:
        ConnectionLostError: when the connections were cut.
    """
    options = dist.AllToAllOptions()
    return _begun(
        wire,
        lambda group: group.alltoall_base(received, payloads, [], [], options),
        (payloads, received),
    )


def all_reduce_over(wire: Wire, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
    """Reduce ``values`` in place, on all ranks of ``wire``.

    Raises:
        ConnectionLostError: when the connections were cut.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    _begun(wire, lambda group: group.allreduce([values], options), values).wait()


def all_gather_over(wire: Wire, rows: Tensor, row: Tensor) -> None:
    """Row ``r`` of ``rows`` becomes the ``row`` of the ``r``-th rank of ``wire``.

    Raises:
        ConnectionLostError: when the connections were cut.
    """
    options = gather_options()
    parts = list(rows.unbind())
    _begun(wire, lambda group: group.allgather([parts], [row], options), (parts, row)).wait()


_SPREAD = 2654435761
"""Knuth's multiplier for hashing by multiplication (The Art of Computer Programming 3, 6.4)."""


def in_turn(tag: int, turn: int) -> int:
    """Another tag for every turn; odd ones stay odd, and all fit gloo's 31 bits."""
    return tag ^ ((turn * _SPREAD & 0x3FFFFFFF) << 1)


def lost(error: RuntimeError, peer: int | None) -> ConnectionLostError:
    """What gloo said of a transfer with ``peer`` (a rank of the default group), as ours."""
    if isinstance(error, ConnectionLostError):
        return error
    made = ConnectionLostError(str(error))
    made.peer = peer
    return made
