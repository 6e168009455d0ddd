"""Connections between some ranks over gloo: what sends, receives, and waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch.distributed as dist

from polyshard.failures import kept_failure_handler


@dataclass
class Job:
    """Works to wait for, one after the other, until one fails."""

    works: Sequence[dist.Work]
    keep: object
    """What must live until they are done."""
    at: int = 0
    """Of the work that is waited for."""
    is_left: bool = False
    """Whether the wait was given up, so that none of the works will move again."""

    def run(self) -> None:
        """Wait for all of them.

        Raises:
            RuntimeError: what gloo raised of the work at :attr:`at`.
        """
        for self.at, work in enumerate(self.works):  # noqa: B020
            work.wait()


class Transfer(Protocol):
    """What a rank waits for, as other threads may look at it."""

    @property
    def tag(self) -> int:
        """It pairs with transfers of the same tag on other ranks."""
        ...

    @property
    def number(self) -> int:
        """What :meth:`Wire.begin` returned."""
        ...

    def peer(self) -> int | None:
        """The rank of the wire it waits for now; ``None`` if that is not known, or it is over."""
        ...


class Wire:
    """The connections of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """``group`` runs on gloo."""
        self.connections: dist.ProcessGroup | None = group
        """What sends and receives, once it is connected."""

    def open(self) -> dist.ProcessGroup:
        """What sends and receives; connected if need be.

        Raises:
            ConnectionLostError: when a rank is gone, or another failure ends the wait for it.
        """
        assert self.connections is not None
        return self.connections

    def begin(self, tag: int) -> int:
        """A transfer of ``tag`` begins; its number among all."""
        del tag
        return 0

    def rank_of(self, peer: int | None) -> int | None:
        """The global rank of the ``peer``-th of this wire."""
        return None if peer is None else dist.get_global_rank(self.open(), peer)

    def number_of(self, rank: int) -> int:
        """What a global rank is called in messages over this wire."""
        return dist.get_group_rank(self.open(), rank)

    def is_over(self, connections: dist.ProcessGroup | None) -> bool:
        """Whether nothing goes over ``connections`` any more, which :meth:`open` returned."""
        del connections
        return False

    def wait(self, job: Job, connections: dist.ProcessGroup | None, transfer: Transfer) -> None:
        """Wait for ``job``, whose messages go over ``connections``.

        Raises:
            RuntimeError: what gloo raised.
            ConnectionLostError: when the connections were cut.
        """
        del connections, transfer
        job.run()


def wire_of(group: dist.ProcessGroup, among: Sequence[int] | None = None) -> Wire:
    """The wire among some ranks of ``group``, or all of them; shared by all who ask for it.

    Args:
        group: Of processes that can connect over gloo.
        among: Global ranks in ascending order. Each of them uses the wire, and no others: the
            first transfer waits until they all have come.
    """
    ranks = tuple(dist.get_process_group_ranks(group) if among is None else among)
    made = kept_failure_handler().wire(group, ranks)
    return Wire(group) if made is None else cast("Wire", made)
