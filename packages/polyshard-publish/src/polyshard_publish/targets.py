"""Where versions go: what a publisher asks of a receiver, and that over a socket."""

from __future__ import annotations

import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from polyshard_publish.errors import PublishError
from polyshard_publish.patches import Patch
from polyshard_publish.wire import Have, Update, Wire

QUEUED = 4
"""Patches that wait to be sent while the next is computed."""


class Sending(ABC):
    """One rank's part of one version to one receiver."""

    @abstractmethod
    def have(self) -> Have:
        """What the receiver serves. Rank 0 asks, first of all."""

    @abstractmethod
    def begin(self, update: Update, rank: int) -> None:
        """Begin a version: rank 0, and when it is answered the others."""

    @abstractmethod
    def send(self, patch: Patch) -> None:
        """Send a patch; may return before it has left."""

    @abstractmethod
    def end(self) -> None:
        """Return when all patches have arrived."""

    @abstractmethod
    def commit(self, digests: Mapping[str, int]) -> None:
        """Have the version served, on rank 0, when all ranks' parts have ended."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; withdraws a version that was not committed."""

    sent_bytes = 0
    """How many bytes have left this rank."""


class Target(ABC):
    """A receiver, as a publisher knows it. Every rank has one, and rank 0 speaks for all."""

    takes_patches = True
    """Whether it keeps a version that patches can change."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For errors and reports."""

    @abstractmethod
    def open(self) -> Sending:
        """A connection for one version.

        Raises:
            OSError: when it is gone.
        """


@dataclass(frozen=True)
class SocketTarget(Target):
    """A :class:`ReceiverServer <polyshard_publish.receiver.ReceiverServer>` in another process.

    Attributes:
        address: ``host:port``.
        token: that it asks for.
        bytes_per_second: the most that this rank sends; as fast as the link is by default.
        timeout_seconds: how long it may take to accept bytes, or to answer. An answer to the last
            frame comes when everything is in place and proven.
    """

    address: str
    token: str = ""
    bytes_per_second: float | None = None
    timeout_seconds: float = 300.0

    @property
    @override
    def name(self) -> str:
        return self.address

    @override
    def open(self) -> Sending:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise PublishError(f"'{self.address}' is no address; one is host:port.")
        connected = socket.create_connection((host, int(port)), min(self.timeout_seconds, 20.0))
        connected.settimeout(self.timeout_seconds)
        return _SocketSending(self, Wire(connected))


class _SocketSending(Sending):
    def __init__(self, target: SocketTarget, wire: Wire) -> None:
        self._target, self._wire = target, wire
        self._queue: queue.Queue[Patch | None] = queue.Queue(QUEUED)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._said: Have | None = None
        self._free_at = 0.0

    @property
    @override
    def sent_bytes(self) -> int:  # type: ignore[override]
        return self._wire.sent_bytes

    @override
    def have(self) -> Have:
        if self._said is None:
            answer = self._wire.ask("hello", {"token": self._target.token})
            self._said = Have(answer["version"], answer["summary"])
        return self._said

    @override
    def begin(self, update: Update, rank: int) -> None:
        self.have()
        head: dict[str, Any] = {**update.head(), "rank": rank}
        if rank:
            head["catalogue"] = {}  # rank 0 has said it
        self._wire.ask("begin", head)

    @override
    def send(self, patch: Patch) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._send_all, name="polyshard-publish", daemon=True
            )
            self._thread.start()
        self._queue.put(patch)
        if self._error is not None:
            raise self._error

    def _send_all(self) -> None:
        while (patch := self._queue.get()) is not None:
            if self._error is not None:
                continue  # the queue must not fill up
            try:
                self._wire.send("patch", patch.head(), patch.content())
                self._hold(patch.nbytes)
            except Exception as error:
                self._error = error

    def _hold(self, nbytes: int) -> None:
        rate = self._target.bytes_per_second
        if rate is not None:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / rate
            time.sleep(max(0.0, self._free_at - time.monotonic()))

    def _drain(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    @override
    def end(self) -> None:
        self._drain()
        if self._error is not None:
            raise self._error
        self._wire.ask("end", {})

    @override
    def commit(self, digests: Mapping[str, int]) -> None:
        content = np.array([digests[name] for name in sorted(digests)], dtype="<i8")
        self._wire.ask("commit", {}, [content.tobytes()])

    @override
    def close(self) -> None:
        self._wire.close()
        self._drain()
