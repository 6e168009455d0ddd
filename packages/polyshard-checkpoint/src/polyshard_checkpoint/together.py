"""What ranks do about one checkpoint together, each learning how it went for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from polyshard._torch.gloo import BESIDE
from polyshard._torch.private import timeout_of
from polyshard.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Attempted(Generic[T]):
    """How something went: its value, or what it raised."""

    value: T | None
    raised: BaseException | None

    def result(self) -> T:
        """The value; or what was raised, again."""
        if self.raised is not None:
            raise self.raised
        return cast("T", self.value)


def attempt(work: Callable[[], T]) -> Attempted[T]:
    """What becomes of ``work``."""
    try:
        return Attempted(work(), None)
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        return Attempted(None, error)


class LostRanksError(CheckpointError):
    """Ranks cannot tell each other how it went: one is gone, or was too late."""

    def __init__(self, error: RuntimeError) -> None:
        """``error`` is what torch raised."""
        super().__init__(f"not all ranks took part: {error}")


class Ranks:
    """All ranks of the job, or this process alone where ``torch.distributed`` is not in use.

    They talk over a gloo group of their own: a save may be written in another thread while the
    job's group is used, and what ranks tell each other are texts and numbers on the host.
    """

    # All of these from the first use on: a run may make its checkpoints before its process group,
    # and end that one before a save has ended, which must not turn every rank into the only one.

    @cached_property
    def alone(self) -> bool:
        """Whether there is no process group."""
        return not dist.is_initialized()

    @cached_property
    def rank(self) -> int:
        """This rank, of all."""
        return 0 if self.alone else dist.get_rank()

    @cached_property
    def size(self) -> int:
        """How many there are."""
        return 1 if self.alone else dist.get_world_size()

    @cached_property
    def _made(self) -> dist.ProcessGroup:
        timeout = timeout_of(cast("dist.ProcessGroup", dist.group.WORLD))
        try:
            made = dist.new_group(backend="gloo", timeout=timeout, group_desc=BESIDE)
        except RuntimeError as error:
            raise LostRanksError(error) from error
        return cast("dist.ProcessGroup", made)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Made by all ranks when the first of them needs it.

        Raises:
            CheckpointError: when not all came within the time-out of the job's process group.
        """
        return None if self.alone else self._made

    def close(self) -> None:
        """Let go of the group and its connections; the next use makes another."""
        made = self.__dict__.pop("_made", None)
        if made is not None and dist.is_initialized():
            dist.destroy_process_group(made)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def leads(self) -> bool:
        """Whether this is the rank that names, completes and drops checkpoints."""
        return self.rank == self.members[0]

    @property
    def members(self) -> Sequence[int]:
        """All that take part."""
        return range(self.size)

    @property
    def part(self) -> tuple[int, int]:
        """This rank's place among the members, from 0, and their number, to share work by."""
        return self.members.index(self.rank), len(self.members)

    @property
    def place(self) -> str:
        """This rank among how many, as in keys of state that belongs to one rank."""
        return f"rank{self.rank}of{self.size}"

    def write(
        self, doing: str, writer: StorageWriter, entries: dict[str, Any], *, partial: bool = False
    ) -> tuple[str, ...]:
        """Write ``entries`` of all; what is missing of them, one sentence a tensor.

        Args:
            doing: for errors.
            writer: that writes the files.
            entries: of this rank.
            partial: whether something may be missing, where that can be.

        Raises:
            CheckpointError: on every rank alike, when it failed on any.
        """
        del partial
        group, alone = self.group, self.alone
        self.agreed(
            doing,
            lambda: dcp.save(entries, storage_writer=writer, process_group=group, no_dist=alone),
        )
        return ()

    def gathered(self, value: T) -> list[T]:
        """``value`` of every rank, in order.

        Raises:
            CheckpointError: when the connection to a rank broke, or one did not come in time.
        """
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        group = self.group
        try:
            dist.all_gather_object(found, value, group=group)
        except RuntimeError as error:
            raise LostRanksError(error) from error
        return found

    def agreed(self, doing: str, work: Callable[[], T]) -> T:
        """The result of ``work`` here, if it succeeded on every rank.

        Raises:
            CheckpointError: on every rank alike, quoting each that failed.
        """
        attempted = attempt(work)
        raised = attempted.raised
        self._refuse(doing, self.gathered(self._said(raised)), raised)
        return attempted.result()

    def led(self, doing: str, work: Callable[[], T]) -> T:
        """The result of ``work`` on the leading rank, on every rank.

        Raises:
            CheckpointError: on every rank alike, when it failed there.
        """
        attempted = attempt(work) if self.leads else Attempted[T](None, None)
        raised = attempted.raised
        every = self.gathered((self._said(raised), attempted.value))
        self._refuse(doing, [said for said, _ in every], raised)
        return cast("T", every[0][1])

    def _said(self, error: BaseException | None) -> str | None:
        """What this rank has to say of an error; nothing of one that torch passed on from others.

        ``torch.distributed.checkpoint`` raises on every rank what it collected from those that
        failed, which therefore say it themselves.
        """
        if isinstance(error, CheckpointException):
            own = error.failures.get(self.rank)
            return None if own is None else _text(own[0])
        return None if error is None else _text(error)

    def _refuse(self, doing: str, said: list[str | None], raised: BaseException | None) -> None:
        every = zip(self.members, said, strict=True)
        failed = [f"rank {rank}: {text}" for rank, text in every if text is not None]
        if len(failed) > 1 and len(set(said)) == 1:
            failed = [f"every rank: {said[0]}"]
        if failed:
            raise CheckpointError(f"{doing} failed. {'; '.join(failed)}") from raised


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
