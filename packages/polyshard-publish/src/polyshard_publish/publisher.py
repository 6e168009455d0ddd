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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyshard.errors import SettingError
from polyshard_checkpoint.together import Ranks
from polyshard_publish.blocks import Block, split
from polyshard_publish.digests import block_digests, digest, summary, wrapped
from polyshard_publish.errors import PublishError, as_gone, as_publish_error
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
from polyshard_publish.targets import Sending, SocketTarget, Target
from polyshard_publish.wire import Have, Update

T = TypeVar("T")
PIECE_BYTES = 8 << 20
"""Of the receiver's dtype: the most that a rank converts at one time."""
GRAIN = 512
"""Elements whose digest is kept together, with ``keep="digests"``."""
Keep = Literal["digests", "values", "nothing"]


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


@dataclass(frozen=True)
class _Walked:
    """What came of one rank's walk through its pieces."""

    digests: Tensor
    value_bytes: int


class _Link:
    """This rank's way to one receiver in one publication, which is left alone once it failed."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.error: PublishError | None = None
        self._sending: Sending | None = None

    @property
    def sent_bytes(self) -> int:
        return 0 if self._sending is None else self._sending.sent_bytes

    def ask(self, work: Callable[[Sending], T]) -> T | None:
        """What ``work`` returns; ``None`` where it fails, and has failed."""
        if self.error is not None:
            return None
        try:
            if self._sending is None:
                self._sending = self.target.open()
            return work(self._sending)
        except Exception as error:
            self.error = as_gone(error)
            return None

    def close(self) -> None:
        if self._sending is not None:
            self._sending.close()


class Publisher:
    """Sends the weights of a sharded model to receivers, version by version.

    Every rank makes one, with the same arguments, and every call is collective over all ranks of
    the job. Nothing is gathered: a rank needs the memory of a few pieces of 8 MiB, and of what
    ``keep`` says.
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
        self._targets = tuple(
            _target(one) for one in (to if isinstance(to, list | tuple) else [to])
        )
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

        links = [_Link(target) for target in self._targets]
        haves = [link.ask(lambda s: s.have()) for link in links if self._ranks.rank == 0]
        for link in links:
            link.close()
        haves, errors = self._ranks.gathered((haves, [link.error for link in links]))[0]
        for link, error in zip(links, errors, strict=True):
            link.error = error
        _raise(None, links)
        return {
            link.target.name: None if have is None else have.version
            for link, have in zip(links, haves, strict=True)
        }

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
            whole = torch.zeros(entry.shape, dtype=entry.torch_dtype, device="cpu")
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
        links = [_Link(target) for target in self._targets]
        try:
            found = self._publish(version, links)
        except PublishError:
            raise
        except Exception as error:  # of the process group: a rank that is gone
            raise PublishError(
                f"version {version}: ranks could not agree ({type(error).__name__}: {error}); "
                "each receiver serves one version whole, this or the last."
            ) from error
        finally:
            for link in links:
                link.close()
        return replace(found, seconds=max(self._ranks.gathered(time.perf_counter() - begin)))

    def _publish(self, version: int, links: list[_Link]) -> Published:
        base = self._base
        updates = self._begin(version, base, links)
        if all(link.error for link in links):  # nothing is walked: what is kept is as it was
            _raise(version, links)
        self._base = Have(None)  # what is kept is about to be that of another version
        walked, failure = self._attempt(lambda: self._walk(updates, links))
        every = self._ranks.gathered((failure, [link.error for link in links]))
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(every) if error]
        if failed or walked is None:
            raise PublishError(
                f"version {version} was not published; receivers serve what they served. "
                f"{'; '.join(failed)}"
            ) from failure
        for index, link in enumerate(links):
            said = [(rank, errors[index]) for rank, (_, errors) in enumerate(every)]
            link.error = next((_from_rank(rank, error) for rank, error in said if error), None)
        if not self._ranks.alone:
            dist.all_reduce(walked.digests, group=self._ranks.group)
        digests = dict(zip(sorted(self.catalogue), walked.digests.tolist(), strict=True))
        if self._ranks.rank == 0:
            with ThreadPoolExecutor(len(links)) as pool:  # all of them at once
                list(pool.map(lambda link: link.ask(lambda s: s.commit(digests)), links))
        told = self._ranks.gathered(
            (
                [link.error for link in links],
                sum(link.sent_bytes for link in links),
                walked.value_bytes,
            )
        )
        if self._keep != "nothing":
            self._base = Have(version, summary(digests))
        for link, error in zip(links, told[0][0], strict=True):
            link.error = error
        _raise(version, links)
        rank_bytes = tuple(count for _, count, _ in told)
        patched = [link.target.name for link, u in zip(links, updates, strict=True) if u.base]
        value_bytes = sum(count for _, _, count in told)
        return Published(version, sum(rank_bytes), value_bytes, rank_bytes, tuple(patched), 0.0)

    def _begin(self, version: int, base: Have, links: list[_Link]) -> list[Update]:
        """Begin the version at each receiver: rank 0 first, which says what each of them gets."""
        whole = Update(version, None, self._ranks.size, os.urandom(12).hex(), self.catalogue)
        updates = [whole for _ in links]
        if self._ranks.rank == 0:
            for index, link in enumerate(links):
                have = link.ask(lambda s: s.have())
                if link.target.takes_patches and base.version is not None and have == base:
                    updates[index] = replace(whole, base=base, catalogue={})
                link.ask(lambda s, u=updates[index]: s.begin(u, 0))  # type: ignore[misc]
        updates, errors = self._ranks.gathered((updates, [link.error for link in links]))[0]
        for link, update, error in zip(links, updates, errors, strict=True):
            link.error = error
            if self._ranks.rank:
                link.ask(lambda s, u=update: s.begin(u, self._ranks.rank))  # type: ignore[misc]
        return updates

    def _walk(self, updates: Sequence[Update], links: Sequence[_Link]) -> _Walked:
        """Send this rank's parts to all receivers that have not failed."""
        places = {name: place for place, name in enumerate(sorted(self.catalogue))}
        totals = [0] * len(places)
        value_bytes = 0
        has_base = any(update.base is not None for update in updates)
        for name, block, values, patch in self._patches(has_base):
            totals[places[name]] += digest(values.view(block.sizes), block.offsets)
            whole: Patch | None = None
            for update, link in zip(updates, links, strict=True):
                one = patch
                if update.base is None:
                    whole = one = whole or Patch.whole(name, block, values.cpu())
                if one is not None and link.error is None:
                    link.ask(lambda s, one=one: s.send(one))  # type: ignore[misc]
                    value_bytes += one.nbytes
        for link in links:
            link.ask(lambda s: s.end())
        digests = torch.tensor(
            [wrapped(total) for total in totals], dtype=torch.int64, device="cpu"
        )
        return _Walked(digests, value_bytes)

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
        for box in split(
            Block((0,) * values.ndim, piece.block.sizes), PIECE_BYTES // dtype.itemsize
        ):
            part = values[box.slices()]
            begins = (a + b for a, b in zip(piece.block.offsets, box.offsets, strict=True))
            yield Block(tuple(begins), box.sizes), part.to(dtype).contiguous().view(-1)

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, PublishError | None]:
        try:
            return work(), None
        except Exception as error:
            return None, as_publish_error(error)


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


def _from_rank(rank: int, error: PublishError) -> PublishError:
    return type(error)(f"rank {rank}: {error}")


def _raise(version: int | None, links: Sequence[_Link]) -> None:
    """One error for what receivers could not take; of their class if all agree."""
    errors = [link.error for link in links if link.error is not None]
    if not errors:
        return
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else PublishError
    said = "; ".join(f"{link.target.name}: {link.error}" for link in links if link.error)
    if version is None:
        raise kind(said)
    rest = (
        f" {len(links) - len(errors)} other receivers serve it." if len(errors) < len(links) else ""
    )
    raise kind(f"version {version} was not taken.{rest} {said}")
