"""The trainer's side: every rank sends its own parts, in the receiver's dtype, and what changed.

[Note: rounding]
A value reaches the receiver by one conversion of the native, sharded value (the master weight):
``tensor.to(dtype)``, which rounds to the nearest value and halfway to the even one. Nothing is
converted twice, and tensors that are not floating-point are never converted.

[Note: one version]
All ranks do the same: (1) rank 0 asks each receiver what it has, begins the version there, and says
what they said; (2) every rank begins too, and walks through its pieces, at most ``PIECE_BYTES`` at
a time: converts, adds to digests, finds what changed, sends; (3) ranks add up digests, and learn
which receivers got everything from all; (4) rank 0 commits at those, withdraws at the others, and
says how it went. A rank that fails says so in (3) instead of leaving others to wait. Ranks meet
three times, each in one sum of integers; only errors, which are rare, are gathered as objects.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyshard.errors import SettingError
from polyshard_checkpoint.together import Ranks
from polyshard_publish.blocks import Block, split
from polyshard_publish.digests import block_digests, digest, summary, wrapped
from polyshard_publish.errors import PublishError, as_publish_error
from polyshard_publish.folder import FolderTarget
from polyshard_publish.patches import Patch, changed_blocks, changed_elements
from polyshard_publish.pieces import Catalogue, Dtypes, Names, Piece, layout_of, state_of
from polyshard_publish.targets import SocketTarget
from polyshard_publish.wire import Have, Update

PIECE_BYTES = 4 << 20  # of the receiver's dtype: the most that a rank converts at one time
GRAIN = 512  # elements whose digest is kept together, with keep="digests"
Keep = Literal["digests", "values", "nothing"]
Target = SocketTarget | FolderTarget


@dataclass(frozen=True)
class Published:
    """How a version went, the same on every rank."""

    version: int
    sent_bytes: int  # of all ranks to all receivers, heads and digests included
    value_bytes: int  # of these, what patches took
    rank_bytes: tuple[int, ...]  # ``sent_bytes`` of each rank
    patched: tuple[str, ...]  # names of the receivers that got patches, the others got everything
    seconds: float  # until all receivers served it


class _Link:
    """This rank's way to one receiver in one publication, which is left alone once it failed."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.error: PublishError | None = None
        self.sending: Any = None
        self.is_patched = False

    def ask(self, what: str, *args: Any) -> Any:
        """What the method ``what`` of it returns; ``None`` where it fails, and has failed."""
        if self.error is not None:
            return None
        try:
            if self.sending is None:
                self.sending = self.target.open()
            return getattr(self.sending, what)(*args)
        except Exception as error:
            self.error = as_publish_error(error, of_link=True)
            return None

    def close(self) -> None:
        if self.sending is not None:
            self.sending.close()


class Publisher:
    """Sends the weights of a sharded model to receivers, version by version.

    Every rank makes one, with the same arguments, and every call is collective over all ranks of
    the job. Nothing is gathered: a rank needs the memory of a few pieces of 4 MiB, and of what
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
                ``SocketTarget`` or ``FolderTarget``, or several of these.
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
        if keep not in get_args(Keep):
            raise SettingError(f"keep={keep!r}: choose 'digests', 'values' or 'nothing'.")
        self._model, self._keep = model, keep
        self._targets = [_target(one) for one in (to if isinstance(to, list | tuple) else [to])]
        if not self._targets:
            raise SettingError("to=[]: name at least one receiver.")
        self._ranks = Ranks()
        dtypes = dtype if callable(dtype) else lambda _: dtype
        self._catalogue, self._pieces = layout_of(
            model, names, dtypes, self._ranks.gathered, self._ranks.rank
        )
        self._base = Have(None)
        self._kept: list[Tensor] = []

    @property
    def catalogue(self) -> Catalogue:
        """What receivers get: dtype and shape of each tensor, by their names."""
        return self._catalogue

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
        haves = [link.ask("have") for link in links if self._ranks.rank == 0]
        for link in links:
            link.close()
        versions = [-1 if not have or have.version is None else have.version for have in haves]
        found = self._told(links, versions or [0] * len(links))
        _raise("", links)
        names = (link.target.name for link in links)
        return {name: None if n < 0 else n for name, n in zip(names, found, strict=True)}

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each of the receiver's tensors, whole, on the host of every rank; collective.

        For engines that want to send whole tensors themselves: one at a time, in the order of
        :attr:`catalogue`, so all ranks take all of them.
        """
        state = state_of(self._model)
        pieces: dict[str, list[Piece]] = {name: [] for name in self.catalogue}
        for piece in self._pieces:
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
            version: from 0 on, greater than what the receivers have.

        Returns:
            How many bytes it took.

        Raises:
            SettingError: when ``version`` is no such number.
            VersionError: when a receiver has this version already, or a later one.
            CatalogueError: when a receiver has other tensors.
            ProofError: when what arrived is not what was sent.
            GoneError: when a receiver does not answer.
            PublishError: for anything else, a rank that failed too.

            All of them on every rank, once all other receivers serve the version; the receivers
            that an error names serve what they served before.
        """
        if type(version) is not int or version < 0:
            raise SettingError(f"publish({version!r}): versions are whole numbers from 0 on.")
        links = [_Link(target) for target in self._targets]
        try:
            return self._publish(version, links)
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

    def _publish(self, version: int, links: list[_Link]) -> Published:
        begun = time.perf_counter()
        rank, base = self._ranks.rank, self._base
        update = Update(version, None, self._ranks.size, secrets.token_hex(7), self.catalogue)
        patch = replace(update, base=base, catalogue={})
        if rank == 0:
            for link in links:
                have = link.ask("have")
                is_known = base.version is not None and have == base
                link.is_patched = is_known and link.target.takes_patches
                link.ask("begin", patch if link.is_patched else update, 0)
        said = [int(update.nonce, 16), version, *(link.is_patched for link in links)]
        nonce, first, *is_patched = self._told(links, said if rank == 0 else [0] * len(said))
        if all(link.error for link in links):  # nothing is walked: what is kept is as it was
            _raise(f"version {version} was not taken.", links)
        self._base = Have(None)  # what is kept is about to be that of another version
        totals, failure, value_bytes = [0] * len(self.catalogue), None, 0
        try:
            if first != version:
                raise PublishError(f"it publishes version {version}, rank 0 version {first}.")
            for link, link.is_patched in zip(links, map(bool, is_patched), strict=True):
                one = patch if link.is_patched else update
                if rank:
                    link.ask("begin", replace(one, nonce=f"{nonce:014x}"), rank)
            totals, value_bytes = self._walk(links)
        except Exception as error:
            failure = as_publish_error(error)
        totals = self._told(links, totals, first, failure)
        digests = dict(zip(sorted(self.catalogue), totals, strict=True))
        if rank == 0:
            with ThreadPoolExecutor(len(links)) as pool:  # all of them at once
                list(pool.map(lambda link: link.ask("commit", digests), links))
        sent = [0] * self._ranks.size
        sent[rank] = sum(link.sending.sent_bytes for link in links if link.sending)
        spent = 0 if rank else round((time.perf_counter() - begun) * 1e9)
        spent, value_bytes, *sent = self._told(links, [spent, value_bytes, *sent])
        if self._keep != "nothing":
            self._base = Have(version, summary(digests))
        served = sum(link.error is None for link in links)
        others = f" {served} other receivers serve it." if served else ""
        _raise(f"version {version} was not taken.{others}", links)
        patched = tuple(link.target.name for link in links if link.is_patched)
        return Published(version, sum(sent), value_bytes, tuple(sent), patched, spent / 1e9)

    def _told(
        self,
        links: Sequence[_Link],
        numbers: Sequence[int],
        version: int = 0,
        failure: PublishError | None = None,
    ) -> list[int]:
        """The sums over ranks of ``numbers`` (modulo 2^64); errors of links are then everybody's.

        Raises:
            PublishError: on every rank, when one has a ``failure``.
        """
        errors = [link.error for link in links]
        summed = torch.tensor([*numbers, any((failure, *errors))], dtype=torch.int64, device="cpu")
        if not self._ranks.alone:
            dist.all_reduce(summed, group=self._ranks.group)
        *found, failed = summed.tolist()
        if not failed:
            return found
        every = self._ranks.gathered((failure, errors))
        said = [f"rank {rank}: {one}" for rank, (one, _) in enumerate(every) if one]
        if said:
            raise PublishError(
                f"version {version} was not published; receivers keep the version before. "
                f"{'; '.join(said)}"
            ) from failure
        for index, link in enumerate(links):
            told = ((rank, one[index]) for rank, (_, one) in enumerate(every) if one[index])
            rank, error = next(told, (0, None))
            if error is not None:  # of receivers, rank 0 speaks for all
                link.error = type(error)(f"rank {rank}: {error}") if rank else error
        return found

    def _walk(self, links: Sequence[_Link]) -> tuple[list[int], int]:
        """Send this rank's parts to receivers that have not failed.

        What it adds to the digests of all tensors, and how many bytes patches took.
        """
        totals, value_bytes = dict.fromkeys(sorted(self.catalogue), 0), 0
        for name, block, values, patch in self._patches(any(link.is_patched for link in links)):
            totals[name] += digest(values.view(block.sizes), block.offsets)
            whole: Patch | None = None
            for link in links:
                one = patch
                if not link.is_patched:
                    whole = one = whole or Patch.whole(name, block, values)
                if one is not None and link.error is None:
                    link.ask("send", one)
                    value_bytes += one.nbytes
        for link in links:
            link.ask("end")
        return [wrapped(total) for total in totals.values()], value_bytes

    @torch.no_grad()
    def _patches(self, has_base: bool) -> Iterator[tuple[str, Block, Tensor, Patch | None]]:
        """This rank's boxes with their values (flat), and the patch since what was kept.

        What is kept is replaced as they go by; without ``has_base`` nothing is compared with it.
        """
        if not has_base:
            self._kept.clear()
        for number, (name, block, values) in enumerate(self._boxes()):
            patch: Patch | None = None
            if not has_base and self._keep != "nothing":
                is_values = self._keep == "values"
                self._kept.append(values.clone() if is_values else block_digests(values, GRAIN))
            elif has_base and self._keep == "values":
                patch = changed_elements(name, block, self._kept[number], values)
                self._kept[number].copy_(values)
            elif has_base:
                old = self._kept[number]
                patch, self._kept[number] = changed_blocks(name, block, old, values, GRAIN)
            yield name, block, values, patch

    def _boxes(self) -> Iterator[tuple[str, Block, Tensor]]:
        """Boxes of this rank's pieces, in the receiver's coordinates and dtype (flat)."""
        state = state_of(self._model)
        for piece in self._pieces:
            dtype, values = self.catalogue[piece.name].torch_dtype, piece.of(state)
            whole = Block((0,) * values.ndim, piece.block.sizes)
            for box in split(whole, PIECE_BYTES // dtype.itemsize):
                begins = (a + b for a, b in zip(piece.block.offsets, box.offsets, strict=True))
                part = values[box.slices()].to(dtype).contiguous().view(-1)
                yield piece.name, Block(tuple(begins), box.sizes), part


def _target(one: Any) -> Target:
    if isinstance(one, Target):
        return one
    if isinstance(one, str):
        return SocketTarget(one)
    if isinstance(one, os.PathLike):
        return FolderTarget(one)
    raise SettingError(
        f"to={one!r}: a receiver is 'host:port', the Path of a folder, a SocketTarget or a "
        "FolderTarget; or give a list."
    )


def _raise(words: str, links: Sequence[_Link]) -> None:
    """One error for what receivers could not take; of their class if all agree."""
    kinds = {type(link.error) for link in links if link.error is not None}
    if kinds:
        kind = kinds.pop() if len(kinds) == 1 else PublishError
        said = "; ".join(f"{link.target.name}: {link.error}" for link in links if link.error)
        raise kind(f"{words} {said}".strip())
