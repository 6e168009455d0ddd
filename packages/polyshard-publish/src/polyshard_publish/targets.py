"""Where versions go: what a publisher asks of a receiver, and that over a socket."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import numpy as np
from typing_extensions import override

from polyshard_publish.errors import PublishError
from polyshard_publish.patches import Patch
from polyshard_publish.wire import Have, Update, Wire


class Sending(ABC):
    """One rank's part of one version to one receiver. Rank 0 asks and begins before the others."""

    sent_bytes = 0  # that have left this rank

    @abstractmethod
    def have(self) -> Have:
        """What the receiver serves."""

    @abstractmethod
    def begin(self, update: Update, rank: int) -> None:
        """Begin a version."""

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


class Target(ABC):
    """A receiver, as a publisher knows it. Every rank has one, and rank 0 speaks for all."""

    takes_patches = True  # because it keeps a version that they can change

    @property
    @abstractmethod
    def name(self) -> str:
        """For errors and reports."""

    @abstractmethod
    def open(self) -> Sending:
        """A connection for one version; an ``OSError`` when it is gone."""


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
    """Sends one patch in a thread while the next is computed."""

    def __init__(self, target: SocketTarget, wire: Wire) -> None:
        self._target, self._wire = target, wire
        self._pool = ThreadPoolExecutor(1, "polyshard-publish")
        self._leaving: Future[None] | None = None
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
            self._said = Have(**answer)
        return self._said

    @override
    def begin(self, update: Update, rank: int) -> None:
        self.have()
        said = replace(update, catalogue={}) if rank else update  # rank 0 says it once
        self._wire.ask("begin", {**asdict(said), "rank": rank})

    @override
    def send(self, patch: Patch) -> None:
        self._wait()
        self._leaving = self._pool.submit(self._send_now, patch)

    def _send_now(self, patch: Patch) -> None:
        self._wire.send("patch", patch.head(), patch.content())
        if (rate := self._target.bytes_per_second) is not None:
            self._free_at = max(self._free_at, time.monotonic()) + patch.nbytes / rate
            time.sleep(max(0.0, self._free_at - time.monotonic()))

    def _wait(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.result()

    @override
    def end(self) -> None:
        self._wait()
        self._wire.ask("end", {})

    @override
    def commit(self, digests: Mapping[str, int]) -> None:
        content = np.array([digests[name] for name in sorted(digests)], dtype="<i8")
        self._wire.ask("commit", {}, [content.tobytes()])

    @override
    def close(self) -> None:
        self._wire.close()
        self._pool.shutdown()
