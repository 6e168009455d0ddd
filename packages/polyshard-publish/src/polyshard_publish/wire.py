"""Frames between ranks and receivers: a JSON head, and bytes.

[Note: wire format]
A frame is ``b"PSW1"``, the bytes of the head (unsigned, 4 bytes, little-endian), those of the
content (8 bytes), the head, the content. The 1 is the format's version; an end that gets another
says so and hangs up. Each rank has a connection to each receiver, for one version:

- ``hello``, with a ``token``; the answer has the ``version`` and ``summary`` that are served;
- ``begin``: an :class:`Update` and the ``rank``, rank 0 first;
- ``patch``: :meth:`Patch.head <polyshard_publish.patches.Patch.head>`, with gaps, codes and values
  as content; it is not answered;
- ``end``: answered when all patches of this rank are there;
- ``commit``, from rank 0: digests of all tensors by sorted name (int64); answered when the version
  is served.

An answer with ``error`` and ``message`` is an error of that class. Nothing is switched before the
``commit``, which comes when all ranks have had their ``end`` answered; a sender that hangs up
before has withdrawn the version. Numbers are little-endian.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from polyshard_publish.errors import KINDS, GoneError, PublishError
from polyshard_publish.pieces import Catalogue, Entry

MAGIC = b"PSW1"
_SIZES = struct.Struct("<4sIQ")
STRANGER_BYTES = 1 << 16
"""What a frame may take before the other end has said its token; answers are smaller."""
MOST_BYTES = 1 << 30
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Have:
    """What a receiver serves: a version, and a number that stands for all of its tensors' digests.

    ``version`` is ``None`` where it serves nothing yet.
    """

    version: int | None
    summary: int = 0


@dataclass(frozen=True)
class Update:
    """The beginning of a version."""

    version: int  # what it will be
    base: Have | None  # what it is made from, which the receiver must have; None for all weights
    ranks: int  # how many send parts of it
    nonce: str  # stands for this attempt at it
    catalogue: Catalogue  # of all tensors; empty where ``base`` says which

    @staticmethod
    def read(head: Mapping[str, Any]) -> Update:
        """That of a head; a :class:`PublishError` when it is none."""
        try:
            base = None if head["base"] is None else Have(**head["base"])
            catalogue = {
                str(name): Entry(str(one["dtype"]), tuple(map(int, one["shape"])))
                for name, one in head["catalogue"].items()
            }
            for entry in catalogue.values():
                entry.torch_dtype  # noqa: B018  # one that is unknown here
            return Update(int(head["version"]), base, int(head["ranks"]), head["nonce"], catalogue)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PublishError(f"an update that cannot be read: {error!r}") from error


class Wire:
    """One end of a connection, and how many bytes it has sent."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._file = connected, connected.makefile("rb")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent_bytes = 0
        self.most_bytes = STRANGER_BYTES

    def send(self, kind: str, head: Mapping[str, Any], content: Iterable[Buffer] = ()) -> None:
        """Send one frame; an ``OSError`` when the other end is gone."""
        text = json.dumps({**head, "kind": kind}, separators=(",", ":")).encode()
        buffers = [memoryview(one).cast("B") for one in content if len(one)]
        length = sum(len(one) for one in buffers)
        first = _SIZES.pack(MAGIC, len(text), length) + text
        self._socket.sendall(first)
        for buffer in buffers:
            self._socket.sendall(buffer)
        self.sent_bytes += len(first) + length

    def receive(self) -> tuple[dict[str, Any], memoryview] | None:
        """The next frame; ``None`` if the other end hung up between frames.

        Raises:
            OSError: when the other end is gone.
            PublishError: when it sends something else.
        """
        first = bytearray(_SIZES.size)
        count = self._read_into(first)
        if not count:
            return None
        if count < _SIZES.size:
            raise ConnectionResetError("the other end hung up")
        magic, text_bytes, content_bytes = _SIZES.unpack(first)
        if magic != MAGIC:
            raise PublishError(
                f"the other end sends {bytes(magic)!r}, this one understands {MAGIC!r}: it is "
                "another version of polyshard-publish, or something else."
            )
        if text_bytes + content_bytes > self.most_bytes:
            raise PublishError(
                f"a frame of {text_bytes:,} and {content_bytes:,} bytes is no frame."
            )
        try:
            head = json.loads(self._exactly(text_bytes))
        except ValueError as error:
            raise PublishError(f"a frame whose head is no JSON: {error}") from error
        if not isinstance(head, dict):
            raise PublishError("a frame whose head is no object.")
        return head, memoryview(self._exactly(content_bytes))

    def is_open(self) -> bool:
        """Whether the other end, which waits for an answer, has not hung up."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _exactly(self, count: int) -> bytearray:
        found = bytearray(count)
        if self._read_into(found) < count:
            raise ConnectionResetError("the other end hung up")
        return found

    def _read_into(self, found: bytearray) -> int:
        try:
            return self._file.readinto(found)
        except ValueError as error:  # `close`, from another thread
            raise ConnectionResetError("this end closed the connection") from error

    def ask(
        self, kind: str, head: Mapping[str, Any], content: Iterable[Buffer] = ()
    ) -> dict[str, Any]:
        """Send a frame and return the answer.

        Raises:
            OSError: when the other end is gone.
            PublishError: what the other end answered, in its class.
        """
        self.send(kind, head, content)
        answer = self.receive()
        if answer is None:
            raise GoneError("it hung up without an answer")
        found, _ = answer
        if "error" in found:
            raise KINDS.get(str(found["error"]), PublishError)(str(found.get("message")))
        return found

    def close(self) -> None:
        """Hang up; also wakes a thread that waits here."""
        with suppress(OSError):  # the other end did so first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()
