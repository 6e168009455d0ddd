"""Round trips between the ranks of the default process group, and what they settle together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from polyshard_trace.clocks.offset import Offset, best_of
from polyshard_trace.errors import TraceError

__all__ = ["Ranks"]

ROUNDS = 16
REFERENCE = 0
_TAG = 0x7472  # of point-to-point messages; nobody else is likely to have chosen it


@dataclass(frozen=True)
class Ranks:
    """This rank among all; alone where there is no process group."""

    rank: int
    size: int

    @classmethod
    def current(cls) -> Ranks:
        """Those of the default process group."""
        if not dist.is_initialized():
            return cls(0, 1)
        return cls(dist.get_rank(), dist.get_world_size())

    def agree(self, problem: TraceError | None) -> str:
        """A name for a run, the same on all ranks, if none has a problem. All ranks call it.

        Raises:
            TraceError: on every rank, saying which have one.
        """
        mine = (None if problem is None else str(problem), secrets.token_hex(8))
        every: list[tuple[str | None, str] | None] = [mine]
        if self.size > 1:
            every = [None] * self.size
            dist.all_gather_object(every, mine)
        told = [one for one in every if one is not None]
        wrong = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]
        if wrong:
            raise TraceError("\n".join(wrong)) from problem
        return told[REFERENCE][1]

    def offset(self, clock: Callable[[], int]) -> Offset:
        """This rank's offset to rank 0's clock. All ranks call it; 16 round trips each, in turn.

        Raises:
            RuntimeError: when a rank is gone, or does not come in the process group's time.
        """
        if self.size == 1 or self.rank == REFERENCE:
            now = clock()
            found = Offset(now, 0, 0)
        if self.size > 1:
            with _messages() as group:
                if self.rank == REFERENCE:
                    self._answer(clock, group)
                else:
                    found = best_of(lambda: _ask(group), clock, ROUNDS)
        return found

    def _answer(self, clock: Callable[[], int], group: dist.ProcessGroup | None) -> None:
        word = torch.zeros(1, dtype=torch.int64)
        for rank in (rank for rank in range(self.size) if rank != REFERENCE):
            for _ in range(ROUNDS):
                dist.recv(word, rank, group, _TAG)
                word[0] = clock()
                dist.send(word, rank, group, _TAG)


def _ask(group: dist.ProcessGroup | None) -> int:
    word = torch.zeros(1, dtype=torch.int64)
    dist.send(word, REFERENCE, group, _TAG)
    dist.recv(word, REFERENCE, group, _TAG)
    return int(word)


@contextmanager
def _messages() -> Iterator[dist.ProcessGroup | None]:
    """A group that moves host memory: the default one if it does, else one for the occasion."""
    if "gloo" in dist.get_backend_config():
        yield None
        return
    group = dist.new_group(backend="gloo", group_desc="clocks of polyshard-trace")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
