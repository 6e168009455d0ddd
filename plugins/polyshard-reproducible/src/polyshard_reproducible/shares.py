"""Slots that replica groups share, as many as are there in a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from polyshard_reproducible.errors import ReproducibleError
from polyshard_reproducible.ranks import Position
from polyshard_reproducible.tree import NEUTRAL, sum_rows


class ReplicaGroups(Protocol):
    """Groups of ranks with whole copies of one model that take part in a step.

    A rank's peers are the ranks of its own number in the other groups.
    """

    @property
    def rank(self) -> int:
        """The number of this group among them."""
        ...

    @property
    def size(self) -> int:
        """How many groups take part."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over this rank and its peers, in place."""
        ...


@dataclass(frozen=True)
class Shares:
    """The largest power of two of groups has slots; the others repeat some and add nothing.

    Attributes:
        replicas: all groups.
        count: those that have slots of their own.
    """

    replicas: ReplicaGroups
    count: int

    @classmethod
    def of(cls, replicas: ReplicaGroups, slots: int, own: Position) -> Shares:
        """Shares of ``slots`` among groups of which each has ranks as ``own``."""
        most = min(replicas.size, slots // (own.shards * own.replicas))
        return cls(replicas, 1 << (most.bit_length() - 1))

    def position(self, own: Position) -> Position:
        """Where a rank is among all, of which ``own`` is its position in its group.

        Shares are below the replicas of a group's own mesh: what a group sums after a turn is
        given to its peers first, then to its own replicas.
        """
        share = self.replicas.rank % self.count
        replica = own.replica * self.count + share
        return replace(own, replicas=own.replicas * self.count, replica=replica)

    def sum_(self, total: Tensor) -> None:
        """Sum what each group made of its slots, in place and in the order of the tree."""
        rank, count = self.replicas.rank, self.count
        if count <= 2:  # of two terms there is one order, and neutral ones change nothing
            self.gather_(total)
            return
        rows = total.new_full((count, *total.shape), NEUTRAL)
        rows[rank % count].copy_(total)
        self.gather_(rows)
        total.copy_(sum_rows(rows))

    def gather_(self, values: Tensor) -> None:
        """Put together, in place, what each group has; elsewhere ``values`` are neutral."""
        if self.replicas.rank >= self.count:
            values.fill_(NEUTRAL)
        self.replicas.all_reduce(values)

    def check(self) -> None:
        """Refuse groups of which this one is none.

        Raises:
            ReproducibleError: with both numbers.
        """
        if not 0 <= self.replicas.rank < self.replicas.size:
            raise ReproducibleError(
                f"reproducible: this is replica group {self.replicas.rank} of "
                f"{self.replicas.size}; groups are counted from 0."
            )
