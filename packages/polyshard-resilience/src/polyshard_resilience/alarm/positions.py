"""Ranks that wait for each other at different places wait for ever: that can be proven.

[Note: ranks apart]
Control flow that differs (an evaluation on one rank alone, layers in another order, a layer that
one rank skips) leaves ranks waiting for transfers that their peers never begin. No time-out is
needed to know: a rank that waits tells the others for whom, for which transfer, and which transfers
it has begun. Follow *who waits for whom*, as long as the awaited one has not begun the transfer. A
circle, whose ranks all still wait for the same thing at a second look, was complete in between, and
a rank that waits begins nothing: none of them ever continues. A slow rank does not wait, and a
message under way was begun, so neither is taken for one. A rank that waits for *all* of some ranks
(in a vote of an attempt, or before a first forward) waits for those of them that are elsewhere.

A key of a transfer holds the turn (the outermost forward, counted from the epoch's begin). So
ranks that are not in the same turn never take each other's numbers, however their transfers
would pair otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from polyshard_resilience.alarm.reports import NOBODY

Find = Callable[[int], "Position | None"]


@dataclass(frozen=True)
class Position:
    """One rank that waits."""

    wait: int
    """Which of its waits: another number means that the last one ended."""
    beat: int
    """Grows as long as it waits."""
    peer: int
    """Or :data:`NOBODY` where it waits for all of ``among``."""
    key: str
    count: int
    """It awaits the ``count``-th transfer of ``key`` with ``peer``."""
    posted: dict[str, int]
    """How many transfers of each key it has begun lately."""
    says: str
    """Where it is, for a person."""
    epoch: int = 0
    """The alarm's. What ranks said in an earlier one is over."""
    among: tuple[int, ...] = ()

    def encode(self) -> str:
        """As text for other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Position:
        """From what :meth:`encode` returned."""
        at = json.loads(text)
        return cls(**{**at, "among": tuple(at["among"])})

    def has_begun(self, other: Position) -> bool:
        """Whether it has begun the transfer that ``other`` awaits from it."""
        return self.posted.get(other.key, 0) >= other.count


@dataclass(frozen=True)
class Circle:
    """Ranks that wait for each other in vain, by rank."""

    positions: dict[int, Position]

    def still_stands(self, find: Find) -> bool | None:
        """Whether all of them wait on for the same; ``None`` while some have not told yet."""
        all_later = True
        for rank, before in self.positions.items():
            now = find(rank)
            if now is None or now.wait != before.wait:
                return False
            all_later = all_later and now.beat > before.beat
        return True if all_later else None

    def describe(self) -> str:
        """Who is where."""
        lines = (f"rank {rank} {at.says}" for rank, at in sorted(self.positions.items()))
        return f"control flow differs between ranks, which wait for each other: {'; '.join(lines)}"


def circle_from(rank: int, find: Find, candidate: int = NOBODY) -> Circle | None:
    """The circle that ``rank`` waits in, or for, if there is one.

    Where it waits for all of some ranks, ``candidate`` is the one of them to look at.
    """
    path = list(_chain(rank, find, candidate))
    ranks = [rank for rank, _ in path]
    repeated = ranks[-1] if path else None
    if repeated is None or ranks.index(repeated) == len(ranks) - 1:
        return None
    return Circle(dict(path[ranks.index(repeated) : -1]))


def _chain(rank: int, find: Find, candidate: int) -> Iterator[tuple[int, Position]]:
    """Whom ``rank`` waits for, whom that one waits for, ... up to the first one met again."""
    path: dict[int, Position] = {}
    at = find(rank)
    while at is not None:
        yield rank, at
        if rank in path:
            return
        path[rank] = at
        elsewhere = (r for r, p in path.items() if r in at.among and not p.has_begun(at))
        other = candidate if len(path) == 1 else NOBODY
        rank = next(elsewhere, other) if at.peer == NOBODY else at.peer
        after = None if rank == NOBODY else find(rank)
        at = None if after is None or after.has_begun(at) else after
