"""Round trips between all ranks, and what they settle together."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from polyshard_cli.trace.clocks.offset import Offset, best_of
from polyshard_cli.trace.errors import TraceError

__all__ = ["Line", "Ranks"]

ROUNDS = 16
REFERENCE = 0
PATIENCE_SECONDS = 120


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

    def connect(self) -> Line:
        """What clocks are compared over. All ranks call it."""
        if self.size == 1:
            return Line(self, None)
        # Its own, for the host's memory: a rank that never comes breaks no other connections.
        group = dist.new_group(
            backend="gloo",
            timeout=timedelta(seconds=PATIENCE_SECONDS),
            group_desc="clocks of polyshard trace",
        )
        return Line(self, group)


@dataclass(frozen=True)
class Line:
    """Connections between all ranks and the reference."""

    ranks: Ranks
    group: dist.ProcessGroup | None

    def offset(self, clock: Callable[[], int]) -> Offset:
        """This rank's offset to rank 0's clock. All ranks call it; 16 round trips each, in turn.

        Raises:
            RuntimeError: when a rank is gone, or does not come within two minutes.
        """
        if self.ranks.rank != REFERENCE:
            return best_of(self._ask, clock, ROUNDS)
        self._answer(clock)
        return Offset(clock(), 0, 0)

    def close(self) -> None:
        """Nothing more is asked."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _answer(self, clock: Callable[[], int]) -> None:
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        for rank in (rank for rank in range(self.ranks.size) if rank != REFERENCE):
            for _ in range(ROUNDS):
                dist.recv(word, rank, self.group)
                word[0] = clock()
                dist.send(word, rank, self.group)

    def _ask(self) -> int:
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        dist.send(word, REFERENCE, self.group)
        dist.recv(word, REFERENCE, self.group)
        return int(word)
