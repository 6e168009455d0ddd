"""The trainer's side: every rank sends its own parts, in the receiver's dtype, and what changed.

[Note: rounding]
A value reaches the receiver by one conversion of the native, sharded value (the master weight):
``tensor.to(dtype)``, which rounds to the nearest value and halfway to the even one. Nothing is
converted twice, and tensors that are not floating-point are never converted.

[Note: one version]
All ranks do the same: (1) rank 0 asks each receiver what it has, begins the version there, and says
what it heard; (2) every rank begins too, and walks through its pieces, at most ``PIECE_BYTES`` at a
time: converts, adds to digests, finds what changed, sends; (3) digests are added up over ranks, and
all ranks hear which receivers got everything from all of them; (4) rank 0 commits at those, and
withdraws at the others. A rank that fails says so in (3) instead of leaving others to wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyshard.errors import SettingError
from polyshard_checkpoint.safetensors.blocks import Block, split
from polyshard_checkpoint.together import Ranks
from polyshard_publish.digests import block_digests, digest, summary, wrapped
from polyshard_publish.errors import PublishError, as_publish_error
from polyshard_publish.folder import FolderTarget
from polyshard_publish.patches import Patch, changed_blocks, changed_elements
from polyshard_publish.pieces import (
    Catalogue,
    Dtypes,
    Layout,
    Names,
    Piece,
    layout_of,
    state_of,
)
from polyshard_publish.targets import Sending, SocketTarget, Target, gone
from polyshard_publish.wire import Have, Update

T = TypeVar("T")
PIECE_BYTES = 8 << 20
"""Of the receiver's dtype: the most that a rank converts at one time."""
GRAIN = 512
"""Elements whose digest is kept together, with ``keep="digests"``."""
Keep = Literal["digests", "values", "nothing"]
To = "str | os.PathLike[str] | Target"


@dataclass(frozen=True)
class Published:
    """How a version went, the same on every rank.

    Attributes:
        version: its number.
        sent_bytes: of all ranks to all receivers, heads and digests included.
        value_bytes: of these, what patches took.
        rank_bytes: ``sent_bytes`` of each rank.
        patched: names of the receivers that got patches, the others got everything.
        seconds: of the slowest rank.
    """

    version: int
    sent_bytes: int
    value_bytes: int
    rank_bytes: tuple[int, ...]
    patched: tuple[str, ...]
    seconds: float


@dataclass
class _Walked:
    """What came of one rank's walk through its pieces."""

    errors: dict[int, PublishError]
    digests: Tensor
    value_bytes: int = 0


class Publisher:
    """Sends the weights of a sharded model to receivers, version by version.

    Every rank makes one, with the same arguments, and every call is collective over all ranks of
    the job. Nothing is gathered: a rank needs the memory of a few pieces of 8 MiB, and what ``keep``
    says.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        to: Any,
        dtype: torch.dtype | Dtypes | None = None,
        names: Names | None = None,
        keep: Keep = "digests",
    ) -> None:
        """Agree on what is published; asks no receiver yet.

        Args:
            model: sharded or not.
            to: receivers: ``"host:port"`` of a :class:`ReceiverServer
                <polyshard_publish.receiver.ReceiverServer>`, the ``Path`` of a folder, a
                :class:`Target <polyshard_publish.targets.Target>`, or several of these.
            dtype: of floating-point tensors at receivers, or a function of the receiver's name that
                says it; their own by default.
            names: what receivers call each tensor, ``None`` for those that they do not get, or the
                parts that it consists of there (:class:`Part <polyshard_publish.pieces.Part>`).
            keep: what is remembered of a version to find what changed: ``"digests"`` of blocks of
                512 elements (8 bytes each), which finds tensors and experts that did not change;
                ``"values"``, a copy of this rank's part in the receiver's dtype, which finds single
                elements; ``"nothing"``, so that each version is sent whole.

        Raises:
            SettingError: on every rank, for names that do not fit the model, and unknown ``keep``.
            CatalogueError: on every rank, for dtypes that cannot be published.
        """
        if keep not in ("digests", "values", "nothing"):
            raise SettingError(f"keep={keep!r}: choose 'digests', 'values' or 'nothing'.")
        self._model, self._keep = model, keep
        self._targets = tuple(_target(one) for one in (to if isinstance(to, list | tuple) else [to]))
        if not self._targets:
            raise SettingError("to=[]: name at least one receiver.")
        self._ranks = Ranks()
        dtypes = dtype if callable(dtype) else lambda _: dtype
        self._layout: Layout = layout_of(
            model, names, dtypes, self._ranks.gathered, self._ranks.rank
        )
        self._base = Have(None)
        self._kept: list[Tensor] = []

    @property
    def catalogue(self) -> Catalogue:
        """What receivers get: dtype and shape of each tensor, by their names."""
        return self._layout.catalogue

    def close(self) -> None:
        """Let go of the process group that ranks agree over."""
        self._ranks.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def served(self) -> dict[str, int | None]:
        """The version that each receiver serves, by its name; ``None`` for nothing yet.

        Raises:
            PublishError: on every rank, when one is gone.
        """

        def ask() -> dict[str, int | None]:
            found = {}
            for target in self._targets:
                sending = _opened(target)
                try:
                    found[target.name] = _asked(target, sending.have).version
                finally:
                    sending.close()
            return found

        return self._led(ask)

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each of the receiver's tensors, whole, on the host of every rank; collective.

        For engines that want to send whole tensors themselves: one at a time, in the order of
        :attr:`catalogue`, so all ranks take all of them.
        """
        state = state_of(self._model)
        pieces: dict[str, list[Piece]] = {name: [] for name in self.catalogue}
        for piece in self._layout.pieces:
            pieces[piece.name].append(piece)
        for name, entry in self.catalogue.items():
            whole = torch.zeros(entry.shape, dtype=entry.torch_dtype)
            for piece in pieces[name]:
                whole[piece.block.slices()] = piece.of(state).to(whole.dtype)
            if not self._ranks.alone and whole.numel():  # the bytes of other ranks' parts are zero
                memory = whole.flatten().view(torch.uint8)
                dist.all_reduce(memory, group=self._ranks.group)
            yield name, whole

    def publish(self, version: int) -> Published:
        """Send the model's weights as ``version``, and have them served; collective.

        Args:
            version: greater than what the receivers have.

        Returns:
            How many bytes it took.

        Raises:
            VersionError: when a receiver has this version already, or a later one.
            CatalogueError: when a receiver has other tensors.
            ProofError: when what arrived is not what was sent.
            GoneError: when a receiver does not answer.
            PublishError: for anything else, a rank that failed too.

            All of them on every rank, once all other receivers serve the version; the receivers
            that an error names serve what they served before.
        """
        begin = time.perf_counter()
        sendings: list[Sending | None] = [None] * len(self._targets)
        try:
            return self._publish(version, sendings, begin)
        except PublishError:
            raise
        except Exception as error:  # of the process group: a rank that is gone
            raise PublishError(
                f"version {version}: ranks could not agree ({type(error).__name__}: {error}); "
                "receivers serve one version whole, this or the last."
            ) from error
        finally:
            for sending in sendings:
                if sending is not None:
                    sending.close()

    def _publish(
        self, version: int, sendings: list[Sending | None], begin: float
    ) -> Published:
        base, nonce = self._base, os.urandom(12).hex()
        self._base = Have(None)  # what is kept is about to be that of another version
        errors: dict[int, PublishError] = {}
        updates: list[Update] = []
        if self._ranks.rank == 0:
            for index, target in enumerate(self._targets):
                update = Update(version, None, self._ranks.size, nonce, self.catalogue)
                try:
                    sendings[index] = sending = _opened(target)
                    have = _asked(target, sending.have)
                    if target.takes_patches and base.version is not None and have == base:
                        update = replace(update, base=base, catalogue={})
                    _asked(target, lambda s=sending, u=update: s.begin(u, 0))  # type: ignore[misc]
                except PublishError as error:
                    errors[index] = error
                updates.append(update)
        updates, errors = self._ranks.gathered((updates, errors))[0]
        if len(errors) == len(self._targets):  # nothing was walked: what is kept is as it was
            self._base = base
            _raise(version, self._targets, errors)
        walked, failure = self._attempt(lambda: self._walk(updates, errors, sendings))
        every = self._ranks.gathered(
            (failure, None if walked is None else walked.errors, 0 if walked is None else walked.value_bytes)
        )
        failed = [f"rank {rank}: {error}" for rank, (error, _, _) in enumerate(every) if error]
        if failed or walked is None:
            raise PublishError(
                f"version {version} was not published; receivers serve what they served. "
                f"{'; '.join(failed)}"
            ) from failure
        for rank, (_, found, _) in enumerate(every):
            for index, error in (found or {}).items():
                errors.setdefault(index, _from_rank(rank, error))
        if not self._ranks.alone:
            dist.all_reduce(walked.digests, group=self._ranks.group)
        digests = dict(zip(sorted(self.catalogue), walked.digests.tolist(), strict=True))
        if self._ranks.rank == 0:
            errors |= self._commit(digests, {i: s for i, s in enumerate(sendings) if i not in errors})
        sent = sum(sending.sent_bytes for sending in sendings if sending is not None)
        told = self._ranks.gathered((errors, sent, time.perf_counter() - begin))
        self._base = Have(version, summary(digests)) if self._keep != "nothing" else Have(None)
        _raise(version, self._targets, told[0][0])
        return Published(
            version,
            sum(count for _, count, _ in told),
            sum(count for _, _, count in every),
            tuple(count for _, count, _ in told),
            tuple(
                target.name
                for target, update in zip(self._targets, updates, strict=True)
                if update.base is not None
            ),
            max(seconds for _, _, seconds in told),
        )

    def _commit(
        self, digests: dict[str, int], sendings: dict[int, Sending | None]
    ) -> dict[int, PublishError]:
        """What receivers answer, all of them asked at once."""

        def one(index: int, sending: Sending | None) -> PublishError | None:
            assert sending is not None
            try:
                _asked(self._targets[index], lambda: sending.commit(digests))
            except PublishError as error:
                return error
            return None

        with ThreadPoolExecutor(max(1, len(sendings))) as pool:
            answers = list(pool.map(one, sendings, sendings.values()))
        return {i: error for i, error in zip(sendings, answers, strict=True) if error is not None}

    def _walk(
        self, updates: Sequence[Update], errors: dict[int, PublishError], sendings: list[Sending | None]
    ) -> _Walked:
        """Send this rank's parts to all receivers that have not failed."""
        found: dict[int, PublishError] = {}
        open_to: dict[int, Sending] = {}

        def at(index: int, work: Callable[[], None]) -> None:
            try:
                _asked(self._targets[index], work)
            except PublishError as error:
                found[index] = error
                open_to.pop(index, None)

        def begin(index: int) -> None:
            sending = sendings[index]
            if sending is None:
                sendings[index] = sending = _opened(self._targets[index])
                sending.begin(updates[index], self._ranks.rank)
            open_to[index] = sending

        for index in range(len(updates)):
            if index not in errors:
                at(index, lambda index=index: begin(index))  # type: ignore[misc]
        places = {name: place for place, name in enumerate(sorted(self.catalogue))}
        totals = [0] * len(places)
        value_bytes = 0
        has_base = any(update.base is not None for update in updates)
        for name, block, values, patch in self._patches(has_base):
            totals[places[name]] += digest(values.view(block.sizes), block.offsets)
            whole: Patch | None = None
            for index, sending in list(open_to.items()):
                one = patch
                if updates[index].base is None:
                    whole = one = whole or Patch.whole(name, block, values.cpu())
                if one is not None:
                    at(index, lambda s=sending, one=one: s.send(one))  # type: ignore[misc]
                    value_bytes += one.nbytes
        for index, sending in list(open_to.items()):
            at(index, sending.end)
        digests = torch.tensor([wrapped(total) for total in totals], dtype=torch.int64)
        return _Walked(found, digests, value_bytes)

    @torch.no_grad()
    def _patches(self, has_base: bool) -> Iterator[tuple[str, Block, Tensor, Patch | None]]:
        """This rank's boxes with their values (flat), and the patch since what was kept.

        What is kept is replaced as they go by; without ``has_base`` nothing is compared with it.
        """
        state, number = state_of(self._model), 0
        if not has_base:
            self._kept.clear()
        for piece in self._layout.pieces:
            for block, values in self._blocks(piece, state):
                patch: Patch | None = None
                if not has_base:
                    self._kept += self._to_keep(values)
                elif self._keep == "values":
                    patch = changed_elements(piece.name, block, self._kept[number], values)
                    self._kept[number].copy_(values)
                else:
                    old = self._kept[number]
                    patch, new = changed_blocks(piece.name, block, old, values, GRAIN)
                    old.copy_(new)
                yield piece.name, block, values, patch
                number += 1

    def _to_keep(self, values: Tensor) -> list[Tensor]:
        if self._keep == "nothing":
            return []
        return [values.clone() if self._keep == "values" else block_digests(values, GRAIN)]

    def _blocks(self, piece: Piece, state: dict[str, Tensor]) -> Iterator[tuple[Block, Tensor]]:
        """Boxes of a piece in the receiver's coordinates, and their values in its dtype (flat)."""
        dtype = self.catalogue[piece.name].torch_dtype
        values = piece.of(state)
        for box in split(Block((0,) * values.ndim, piece.block.sizes), PIECE_BYTES // dtype.itemsize):
            part = values[box.slices()]
            begins = (a + b for a, b in zip(piece.block.offsets, box.offsets, strict=True))
            yield Block(tuple(begins), box.sizes), part.to(dtype).contiguous().view(-1)

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, PublishError | None]:
        try:
            return work(), None
        except Exception as error:
            return None, as_publish_error(error)

    def _led(self, work: Callable[[], T]) -> T:
        """The result of ``work`` on rank 0, or what it raised there, on every rank."""
        found: tuple[T | None, PublishError | None] = (None, None)
        if self._ranks.rank == 0:
            try:
                found = work(), None
            except PublishError as error:
                found = None, error
        value, error = self._ranks.gathered(found)[0]
        if error is not None:
            raise error
        assert value is not None
        return value


def _target(one: Any) -> Target:
    if isinstance(one, Target):
        return one
    if isinstance(one, str):
        return SocketTarget(one)
    if isinstance(one, os.PathLike):
        return FolderTarget(one)
    raise SettingError(
        f"to={one!r}: a receiver is 'host:port', the Path of a folder, or a Target; or give a list."
    )


def _opened(target: Target) -> Sending:
    return _asked(target, target.open)


def _asked(target: Target, work: Callable[[], T]) -> T:
    """The answer of a receiver.

    Raises:
        PublishError: naming it.
    """
    try:
        return work()
    except Exception as error:
        raise gone(target, error) from error


def _from_rank(rank: int, error: PublishError) -> PublishError:
    return type(error)(f"rank {rank}: {error}")


def _raise(version: int, targets: Iterable[Target], errors: dict[int, PublishError]) -> None:
    """One error for what receivers could not take; of the first one's class if all agree."""
    if not errors:
        return
    said = [f"{target.name}: {errors[i]}" for i, target in enumerate(targets) if i in errors]
    kinds = {type(error) for error in errors.values()}
    kind = kinds.pop() if len(kinds) == 1 else PublishError
    count = len(list(targets)) - len(errors)
    rest = f" {count} other receivers serve it." if count else ""
    raise kind(f"version {version} was not taken.{rest} {'; '.join(said)}")


