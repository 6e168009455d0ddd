"""What an inference process holds: the weights of one version, whole, or none.

[Note: atomic versions]
Patches of a version are kept aside until all ranks have sent theirs and rank 0 says the digests of
all tensors. Then, while no reader is let in, each patch is exchanged with what is in its place, and
tensor's digest is computed from the memory that will be served. If one differs the patches are
exchanged back. Memory is that of the weights and of one update. A sender that dies before its
``commit`` has changed nothing, and a receiver that dies has nothing half-written, as it holds
weights in memory alone: it starts empty and gets all weights with the next version.
"""

from __future__ import annotations

import hmac
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyshard_publish.digests import digest_of, summary
from polyshard_publish.errors import (
    CatalogueError,
    GoneError,
    ProofError,
    PublishError,
    VersionError,
    as_publish_error,
)
from polyshard_publish.patches import Patch
from polyshard_publish.pieces import Catalogue, Entry, differences
from polyshard_publish.wire import MOST_BYTES, Have, Update, Wire

NAMED = 5  # tensors that an error names


@dataclass(frozen=True)
class Served:
    """What a receiver serves."""

    version: int
    tensors: Mapping[str, Tensor]  # by the receiver's names; not to be written
    changed: frozenset[str]  # names of those that differ from the version before


@dataclass
class _Staged:
    update: Update
    catalogue: Catalogue
    patches: list[Patch] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    error: PublishError | None = None


class Receiver:
    """Weights that are taken over version by version. See [Note: atomic versions].

    Methods may be called from any thread.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor] | None = None, *, version: int | None = None
    ) -> None:
        """Start with nothing, with room, or with weights.

        Args:
            tensors: contiguous ones, by name, that are written in place; a version with other
                names, shapes or dtypes is refused. Without, the first version says what there is.
            version: what ``tensors`` are, if they are weights already.

        Raises:
            CatalogueError: for tensors that are not contiguous or of a dtype that cannot be sent.
        """
        held = {name: tensor.detach() for name, tensor in (tensors or {}).items()}
        strided = sorted(n for n, t in held.items() if not t.is_contiguous())
        if strided:
            raise CatalogueError(f"Receiver(tensors=...): '{strided[0]}' is not contiguous.")
        self._tensors = None if tensors is None else held
        self._catalogue = {n: Entry.of(n, t.dtype, t.shape) for n, t in held.items()}
        self._digests: dict[str, int] = {}
        self._served: Served | None = None
        if version is not None:
            self._digests = {name: digest_of(tensor) for name, tensor in held.items()}
            self._served = Served(version, held, frozenset(held))
        self._staged: _Staged | None = None
        self._free = threading.Condition(threading.RLock())
        self._readers = 0
        self._is_switching = False

    @property
    def have(self) -> Have:
        """The version that is served."""
        with self._free:
            if self._served is None:
                return Have(None)
            return Have(self._served.version, summary(self._digests))

    @contextmanager
    def serving(self) -> Iterator[Served]:
        """The weights of one version, which do not change inside. Not to be nested."""
        with self._free:
            self._free.wait_for(lambda: not self._is_switching)
            if self._served is None:
                raise PublishError("nothing was published yet; wait(version) waits for it.")
            self._readers += 1
            found = self._served
        try:
            yield found
        finally:
            with self._free:
                self._readers -= 1
                self._free.notify_all()

    def wait(self, version: int, timeout_seconds: float | None = None) -> int:
        """Wait until ``version`` or a later one is served; which that is, or a ``GoneError``."""
        with self._free:
            came = self._free.wait_for(
                lambda: self._served is not None and self._served.version >= version,
                timeout_seconds,
            )
            if not came or self._served is None:
                raise GoneError(
                    f"version {version} did not come within {timeout_seconds:.0f} s; "
                    f"{self._said()} is served."
                )
            return self._served.version

    def _said(self) -> str:
        return "nothing" if self._served is None else f"version {self._served.version}"

    # Receiving --------------------------------------------------------------------------------

    def begin(self, update: Update, rank: int = 0) -> None:
        """A rank's first word about a version; rank 0 says it before the others."""
        with self._free:
            if rank:
                self._of(update.nonce)
                return
            self._check_version(update)
            catalogue = self._catalogue if update.base is not None else update.catalogue
            if self._tensors is not None and (found := differences(catalogue, self._catalogue)):
                more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
                raise CatalogueError(
                    f"version {update.version} is not of the receiver's model: "
                    f"{'; '.join(found[:NAMED])}{more}. Give the receiver's names= and dtype= to "
                    "the publisher, or start another receiver."
                )
            self._staged = _Staged(update, catalogue)

    def _check_version(self, update: Update) -> None:
        version, have = update.version, self.have
        if have.version is not None and version <= have.version:
            late = "served already" if version == have.version else f"older than {have.version}"
            raise VersionError(
                f"version {version} is {late}; {self._said()} stays. Count on from {have.version}."
            )
        if self._staged is not None and version < self._staged.update.version:
            raise VersionError(
                f"version {version} is late: version {self._staged.update.version} is on its way."
            )
        if update.base is not None and update.base != have:
            raise VersionError(
                f"version {version} is made from version {update.base.version} with digest "
                f"{update.base.summary}, but {self._said()} with {have.summary} is served."
            )

    def stage(self, nonce: str, head: dict[str, Any], content: memoryview) -> None:
        """Keep a patch aside. What is wrong with it is raised by :meth:`end`."""
        with self._free:
            staged = self._of(nonce)
        if staged.error is not None:
            return
        try:
            entry = staged.catalogue.get(str(head.get("name")))
            if entry is None:
                raise CatalogueError(f"'{head.get('name')}' is unknown.")
            patch = Patch.read(head, content, entry.torch_dtype)
            box = zip(patch.block.offsets, patch.block.sizes, entry.shape, strict=False)
            is_alike = len(patch.block.sizes) == len(entry.shape)
            if not is_alike or any(begin + size > whole for begin, size, whole in box):
                raise CatalogueError(
                    f"'{patch.name}' {list(entry.shape)} has no elements at "
                    f"{patch.block.offsets} with sizes {patch.block.sizes}."
                )
            staged.patches.append(patch)
        except PublishError as error:
            staged.error = error
            staged.patches.clear()

    def end(self, nonce: str, rank: int) -> None:
        """A rank has sent all of its patches; raises what is wrong with one."""
        with self._free:
            staged = self._of(nonce)
            if staged.error is not None:
                raise staged.error
            staged.ended.add(rank)

    def abandon(self, nonce: str) -> None:
        """Forget a version that is not complete."""
        with self._free:
            if self._staged is not None and self._staged.update.nonce == nonce:
                self._staged = None

    def commit(
        self, nonce: str, digests: Sequence[int], is_awaited: Callable[[], bool] = lambda: True
    ) -> None:
        """Serve a version whose tensors have these ``digests``, in the order of their names.

        ``is_awaited``: whether the sender still waits for that. One that has given up meanwhile,
        because readers took too long, was told that the version is not served.

        Raises:
            VersionError: when it is not complete, or was withdrawn.
            ProofError: when a tensor's digest differs; what was served before is served on.
        """
        with self._free:
            staged = self._of(nonce)
            version = staged.update.version
            missing = sorted(set(range(staged.update.ranks)) - staged.ended)
            if missing:
                raise VersionError(f"version {version} lacks the tensors of ranks {missing}.")
            if staged.update.base is None:
                _check_whole(staged)
            if len(digests) != len(staged.catalogue):
                raise ProofError(f"version {version} has digests of other tensors.")
            self._staged = None  # no patch is added to it now
            self._free.wait_for(lambda: not self._is_switching)
            self._is_switching = True
            try:
                self._free.wait_for(lambda: not self._readers)
                if not is_awaited():
                    raise GoneError(f"version {version}: its sender waits no longer.")
                self._check_version(staged.update)
                self._switch(staged, dict(zip(sorted(staged.catalogue), digests, strict=True)))
            finally:
                self._is_switching = False
                self._free.notify_all()

    def _switch(self, staged: _Staged, digests: Mapping[str, int]) -> None:
        tensors = self._tensors
        if tensors is None:
            tensors = {
                name: torch.zeros(entry.shape, dtype=entry.torch_dtype, device="cpu")
                for name, entry in staged.catalogue.items()
            }
        changed = frozenset(patch.name for patch in staged.patches)
        back: list[Patch] = []
        try:
            while staged.patches:
                patch = staged.patches.pop()
                old = patch.swap(tensors[patch.name])
                if self._tensors is not None:
                    back.append(old)
            found = {name: digest_of(tensor) for name, tensor in tensors.items()}
            wrong = sorted(name for name in digests if found[name] != digests[name])
            if wrong:
                raise ProofError(
                    f"version {staged.update.version} arrived with other values than it was sent "
                    f"with in {named(wrong)}; {self._said()} stays."
                )
        except BaseException:
            for patch in reversed(back):
                patch.swap(tensors[patch.name])
            raise
        self._tensors, self._catalogue, self._digests = tensors, dict(staged.catalogue), found
        self._served = Served(staged.update.version, tensors, changed)

    def _of(self, nonce: str) -> _Staged:
        if self._staged is None or self._staged.update.nonce != nonce:
            now = "none is" if self._staged is None else f"{self._staged.update.version} is"
            raise VersionError(
                f"that version was withdrawn; {now} on its way, {self._said()} served."
            )
        return self._staged


def named(tensors: Sequence[str]) -> str:
    """The first of these names, and how many there are besides."""
    more = f" and {len(tensors) - NAMED} others" if len(tensors) > NAMED else ""
    return ", ".join(map(repr, tensors[:NAMED])) + more


def _check_whole(staged: _Staged) -> None:
    """Every element has come; that none came twice instead of another is for the digests."""
    came = dict.fromkeys(staged.catalogue, 0)
    for patch in staged.patches:
        came[patch.name] += patch.elements()
    for name, entry in staged.catalogue.items():
        wanted = math.prod(entry.shape)
        if came[name] != wanted:
            raise ProofError(
                f"version {staged.update.version} has {came[name]:,} of {wanted:,} elements of "
                f"'{name}'."
            )


# Over sockets ---------------------------------------------------------------------------------


class ReceiverServer:
    """Takes versions for a receiver over TCP, in threads of its own.

    ``with ReceiverServer(receiver) as server:`` listens until the end of the block.
    """

    def __init__(
        self, receiver: Receiver, host: str = "127.0.0.1", port: int = 0, *, token: str = ""
    ) -> None:
        """Listen at ``host`` and ``port`` (0: one that is free).

        Args:
            receiver: gets what comes.
            host: a client that reaches it and knows the ``token`` can replace weights, so not the
                address of a network that others use.
            port: to listen at.
            token: that senders must say.

        Raises:
            OSError: when it cannot listen there.
        """
        self.receiver, self._token = receiver, token
        self._door = socket.create_server((host, port), backlog=128)
        self._wires: set[Wire] = set()
        self.address = "{}:{}".format(*self._door.getsockname()[:2])  # for a publisher's to=
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="polyshard-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and hang up on senders; what is served stays."""
        self._is_closed = True
        with suppress(OSError):  # closed before
            self._door.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join()
        self._door.close()
        for wire in list(self._wires):
            wire.close()

    def __enter__(self) -> ReceiverServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _listen(self) -> None:
        while not self._is_closed:
            with suppress(OSError):  # this end closed, or the other at once
                connected, _ = self._door.accept()
                threading.Thread(target=self._hear, args=(connected,), daemon=True).start()

    def _hear(self, connected: socket.socket) -> None:
        """One connection: one rank's part of one version."""
        wire = Wire(connected)
        self._wires.add(wire)
        session = _Session(self.receiver, self._token, wire)
        try:
            while (frame := wire.receive()) is not None:
                try:
                    answer = session.answer(*frame)
                except Exception as error:
                    found = as_publish_error(error)
                    answer = {"error": type(found).__name__, "message": str(found)}
                if answer is not None:
                    wire.send("answer", answer)
        except (OSError, PublishError):
            pass  # the other end has withdrawn the version, or this one was closed
        finally:
            self.receiver.abandon(session.nonce)
            self._wires.discard(wire)
            wire.close()


@dataclass
class _Session:
    receiver: Receiver
    token: str
    wire: Wire
    nonce: str = ""
    rank: int = -1
    is_known: bool = False

    def answer(self, head: dict[str, Any], content: memoryview) -> dict[str, Any] | None:
        receiver, kind = self.receiver, head.pop("kind", None)
        if kind == "hello":
            if not hmac.compare_digest(str(head.get("token")).encode(), self.token.encode()):
                time.sleep(0.1)
                raise PublishError("the token is not this receiver's.")
            self.is_known, self.wire.most_bytes = True, MOST_BYTES
            return asdict(receiver.have)
        if not self.is_known:
            raise PublishError("say hello first.")
        if kind == "begin":
            rank, update = int(head.pop("rank")), Update.read(head)
            receiver.begin(update, rank)
            self.nonce, self.rank = update.nonce, rank
        elif kind == "patch":
            with suppress(VersionError):  # withdrawn; the end says so
                receiver.stage(self.nonce, head, content)
            return None
        elif kind == "end":
            receiver.end(self.nonce, self.rank)
        elif kind == "commit":
            digests = np.frombuffer(content, dtype="<i8").tolist()
            receiver.commit(self.nonce, digests, self.wire.is_open)
        else:
            raise PublishError(f"frames of kind {kind!r} are not known; is the sender newer?")
        return {}
