"""What an inference process holds: the weights of one version, whole, or none.

[Note: atomic versions]
Patches of a version are kept aside until all ranks have sent theirs and rank 0 says the digests of
all tensors. Then, while nobody reads, each patch is exchanged with what is in its place, and every
tensor's digest is computed from the memory that will be served. If one differs the patches are
exchanged back. Memory is that of the weights and of one update. A sender that dies before its
``commit`` has changed nothing, and a receiver that dies has nothing half-written, as it holds
weights in memory alone: it starts empty and gets all weights with the next version.
"""

from __future__ import annotations

import hmac
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

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

NAMED = 5
"""Tensors that an error names."""


@dataclass(frozen=True)
class Served:
    """What a receiver serves.

    Attributes:
        version: its number.
        tensors: by the receiver's names; not to be written.
        changed: names of those that differ from the version before.
    """

    version: int
    tensors: Mapping[str, Tensor]
    changed: frozenset[str]


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
        strided = sorted(n for n, t in (tensors or {}).items() if not t.is_contiguous())
        if strided:
            raise CatalogueError(f"Receiver(tensors=...): '{strided[0]}' is not contiguous.")
        self._tensors = None if tensors is None else dict(tensors)
        self._digests: dict[str, int] = {}
        self._served: Served | None = None
        if version is not None:
            held = self._tensors or {}
            self._digests = {name: digest_of(tensor) for name, tensor in held.items()}
            self._served = Served(version, held, frozenset(held))
        self._catalogue: Catalogue = {
            name: Entry.of(name, tensor.dtype, tensor.shape)
            for name, tensor in (self._tensors or {}).items()
        }
        self._staged: _Staged | None = None
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)
        self._readers = 0
        self._is_switching = False

    # Serving ----------------------------------------------------------------------------------

    @property
    def have(self) -> Have:
        """The version that is served."""
        with self._lock:
            if self._served is None:
                return Have(None)
            return Have(self._served.version, summary(self._digests))

    @property
    def catalogue(self) -> Catalogue:
        """What there is room for, or is served; empty before the first version."""
        with self._lock:
            return self._catalogue

    @contextmanager
    def serving(self) -> Iterator[Served]:
        """The weights of one version, which do not change inside. Not to be nested.

        Raises:
            PublishError: when nothing was published yet.
        """
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
        """Wait until ``version`` or a later one is served; which that is.

        Raises:
            GoneError: when it did not come in time.
        """
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
        """A rank's first word about a version; rank 0 says it before the others.

        Raises:
            VersionError: when it is not a next one of what is served.
            CatalogueError: when it is that of another model.
        """
        with self._lock:
            if rank:
                self._of(update.nonce)
                return
            self._check_version(update)
            if update.base is not None:
                catalogue = self._catalogue
            else:
                catalogue = update.catalogue
                if self._tensors is not None:
                    _refuse(update.version, differences(catalogue, self._catalogue))
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
        with self._lock:
            staged = self._of(nonce)
            if staged.error is not None:
                return
        try:
            entry = staged.catalogue.get(str(head.get("name")))
            if entry is None:
                raise CatalogueError(f"'{head.get('name')}' is unknown.")
            patch = Patch.read(head, content, entry.torch_dtype)
            _check_inside(patch, entry)
        except PublishError as error:
            staged.error = error
            staged.patches.clear()
            return
        with self._lock:
            staged.patches.append(patch)

    def end(self, nonce: str, rank: int) -> None:
        """A rank has sent all of its patches.

        Raises:
            VersionError: when the version was withdrawn.
            PublishError: what is wrong with a patch.
        """
        with self._lock:
            staged = self._of(nonce)
            if staged.error is not None:
                raise staged.error
            staged.ended.add(rank)

    def abandon(self, nonce: str) -> None:
        """Forget a version that is not complete."""
        with self._lock:
            if self._staged is not None and self._staged.update.nonce == nonce:
                self._staged = None

    def commit(self, nonce: str, digests: Mapping[str, int]) -> None:
        """Serve a version, once it is proven to be what the sender has.

        Raises:
            VersionError: when it is not complete, or was withdrawn.
            ProofError: when a tensor's digest differs; what was served before is served on.
        """
        with self._free:
            staged = self._of(nonce)
            missing = sorted(set(range(staged.update.ranks)) - staged.ended)
            if missing:
                raise VersionError(
                    f"version {staged.update.version} lacks what ranks {missing} send."
                )
            if staged.update.base is None:
                _check_whole(staged)
            if set(digests) != set(staged.catalogue):
                raise ProofError(f"version {staged.update.version} has digests of other tensors.")
            self._staged = None  # nobody adds to it now
            self._free.wait_for(lambda: not self._is_switching)
            self._is_switching = True
            try:
                self._free.wait_for(lambda: not self._readers)
                self._check_version(staged.update)
                self._switch(staged, digests)
            finally:
                self._is_switching = False
                self._free.notify_all()

    def _switch(self, staged: _Staged, digests: Mapping[str, int]) -> None:
        is_new = self._tensors is None
        tensors = self._tensors if self._tensors is not None else _room(staged.catalogue)
        changed = frozenset(patch.name for patch in staged.patches)
        back: list[Patch] = []
        try:
            while staged.patches:
                patch = staged.patches.pop()
                old = patch.swap(tensors[patch.name])
                if not is_new:
                    back.append(old)
            found = {name: digest_of(tensor) for name, tensor in tensors.items()}
            wrong = sorted(name for name in digests if found[name] != digests[name])
            if wrong:
                more = f" and {len(wrong) - NAMED} others" if len(wrong) > NAMED else ""
                raise ProofError(
                    f"version {staged.update.version} arrived with other values than it was sent "
                    f"with in {', '.join(map(repr, wrong[:NAMED]))}{more}; {self._said()} stays."
                )
        except BaseException:
            for patch in reversed(back):
                patch.swap(tensors[patch.name])
            raise
        self._tensors, self._catalogue, self._digests = tensors, staged.catalogue, found
        self._served = Served(staged.update.version, tensors, changed)

    def catalogue_of(self, nonce: str) -> Catalogue:
        """All tensors of a version that is on its way.

        Raises:
            VersionError: when it was withdrawn.
        """
        with self._lock:
            return self._of(nonce).catalogue

    def _of(self, nonce: str) -> _Staged:
        if self._staged is None or self._staged.update.nonce != nonce:
            now = "none is" if self._staged is None else f"{self._staged.update.version} is"
            raise VersionError(
                f"that version was withdrawn; {now} on its way, {self._said()} served."
            )
        return self._staged


def _room(catalogue: Catalogue) -> dict[str, Tensor]:
    return {
        n: torch.zeros(e.shape, dtype=e.torch_dtype, device="cpu") for n, e in catalogue.items()
    }


def _refuse(version: int, found: list[str]) -> None:
    if found:
        more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
        raise CatalogueError(
            f"version {version} is not of the receiver's model: {'; '.join(found[:NAMED])}{more}. "
            "Give the receiver's names= and dtype= to the publisher, or start another receiver."
        )


def _check_inside(patch: Patch, entry: Entry) -> None:
    box = zip(patch.block.offsets, patch.block.sizes, entry.shape, strict=False)
    fits = len(patch.block.sizes) == len(entry.shape) == len(patch.block.offsets)
    if not fits or any(begin + size > whole for begin, size, whole in box):
        raise CatalogueError(
            f"'{patch.name}' {list(entry.shape)} has no elements at {patch.block.offsets} with "
            f"sizes {patch.block.sizes}."
        )


def _check_whole(staged: _Staged) -> None:
    """Every element has come; that none came twice instead of another is for the digests."""
    came = dict.fromkeys(staged.catalogue, 0)
    for patch in staged.patches:
        came[patch.name] += patch.elements()
    for name, entry in staged.catalogue.items():
        wanted = int(np.prod(entry.shape, dtype=np.int64))
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
            host: whoever reaches it and knows the ``token`` can replace weights, so not the address
                of a network that others use.
            port: to listen at.
            token: that senders must say.

        Raises:
            OSError: when it cannot listen there.
        """
        self.receiver = receiver
        self._server = _Threads((host, port), _Handler)
        self._server.receiver, self._server.token = receiver, token
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="polyshard-receiver", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port``, for a publisher's ``to=``."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Listen no more, and hang up on senders; what is served stays."""
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()
        self._thread.join()

    def __enter__(self) -> ReceiverServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _Threads(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    receiver: Receiver
    token: str

    def __init__(self, *args: Any) -> None:
        self.wires: set[Wire] = set()
        super().__init__(*args)

    def hang_up(self) -> None:
        for wire in list(self.wires):
            wire.close()


class _Handler(socketserver.BaseRequestHandler):
    """One connection: one rank's part of one version."""

    server: _Threads

    @override
    def handle(self) -> None:
        self._wire = wire = Wire(self.request)
        self.server.wires.add(wire)
        self._nonce, self._rank, self._is_known = "", -1, False
        try:
            while (frame := wire.receive()) is not None:
                head, content = frame
                try:
                    answer = self._answer(head.pop("kind", None), head, content)
                except Exception as error:
                    found = as_publish_error(error)
                    answer = {"error": type(found).__name__, "message": str(found)}
                if answer is not None:
                    wire.send("answer", answer)
        except (OSError, PublishError):
            pass  # whoever is at the other end has withdrawn the version
        finally:
            self.server.receiver.abandon(self._nonce)
            self.server.wires.discard(wire)
            wire.close()

    def _answer(
        self, kind: Any, head: dict[str, Any], content: memoryview
    ) -> dict[str, Any] | None:
        receiver = self.server.receiver
        if kind == "hello":
            if not hmac.compare_digest(str(head.get("token")).encode(), self.server.token.encode()):
                time.sleep(0.1)
                raise PublishError("the token is not this receiver's.")
            self._is_known = True
            self._wire.most_bytes = MOST_BYTES
            have = receiver.have
            return {"version": have.version, "summary": have.summary}
        if not self._is_known:
            raise PublishError("say hello first.")
        if kind == "begin":
            rank, update = int(head.pop("rank")), Update.read(head)
            receiver.begin(update, rank)
            self._nonce, self._rank = update.nonce, rank
        elif kind == "patch":
            with suppress(VersionError):  # withdrawn; the end says so
                receiver.stage(self._nonce, head, content)
            return None
        elif kind == "end":
            receiver.end(self._nonce, self._rank)
        elif kind == "commit":
            names = sorted(receiver.catalogue_of(self._nonce))
            digests = np.frombuffer(content, dtype="<i8").tolist()
            receiver.commit(self._nonce, dict(zip(names, digests, strict=True)))
        else:
            raise PublishError(f"frames of kind {kind!r} are not known; is the sender newer?")
        return {}
