"""Versions over a socket: what a publisher asks of a receiver."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np

from polyshard_publish.errors import PublishError
from polyshard_publish.patches import Patch
from polyshard_publish.wire import Have, Update, Wire


@dataclass(frozen=True)
class SocketTarget:
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

    takes_patches: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """For errors and reports."""
        return self.address

    def open(self) -> SocketSending:
        """A connection for one version; an ``OSError`` when the receiver is gone."""
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise PublishError(f"'{self.address}' is no address; one is host:port.")
        connected = socket.create_connection((host, int(port)), min(self.timeout_seconds, 20.0))
        connected.settimeout(self.timeout_seconds)
        return SocketSending(self, Wire(connected))


class SocketSending:
    """One rank's part of one version to one receiver.

    Rank 0 asks what the receiver has and begins, then the others begin. A patch is sent in a thread
    while the next is computed; all have arrived at the ``end``. ``close`` withdraws a version that
    rank 0 has not committed.
    """

    def __init__(self, target: SocketTarget, wire: Wire) -> None:
        self._target, self._wire = target, wire
        self._pool = ThreadPoolExecutor(1, "polyshard-publish")
        self._leaving: Future[None] | None = None
        self._said: Have | None = None
        self._free_at = 0.0

    @property
    def sent_bytes(self) -> int:
        """How many have left this rank."""
        return self._wire.sent_bytes

    def have(self) -> Have:
        """What the receiver serves."""
        if self._said is None:
            answer = self._wire.ask("hello", {"token": self._target.token})
            self._said = Have(answer["version"], answer["summary"])
        return self._said

    def begin(self, update: Update, rank: int) -> None:
        """Begin a version."""
        self.have()
        said = replace(update, catalogue={}) if rank else update  # rank 0 says it once
        self._wire.ask("begin", {**asdict(said), "rank": rank})

    def send(self, patch: Patch) -> None:
        """Send a patch; returns before it has left."""
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

    def end(self) -> None:
        """Return when all patches have arrived."""
        self._wait()
        self._wire.ask("end", {})

    def commit(self, digests: Mapping[str, int]) -> None:
        """Have the version served."""
        content = np.array([digests[name] for name in sorted(digests)], dtype="<i8")
        self._wire.ask("commit", {}, [content.tobytes()])

    def close(self) -> None:
        """Hang up."""
        self._wire.close()
        self._pool.shutdown()
