"""Which of many settings no other beats in both memory and time, and which is the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Measured(Protocol):
    """Anything that takes memory and time."""

    @property
    def memory_bytes(self) -> int:
        """The most that a device holds."""

    @property
    def seconds(self) -> float:
        """Of a step."""


M = TypeVar("M", bound=Measured)


def front_of(tried: Sequence[M]) -> tuple[M, ...]:
    """The Pareto front, the fastest first: each of the others takes more memory or time.

    Of several that are equal in both, the first.
    """
    front: list[M] = []
    for one in sorted(tried, key=_by_time):
        if not front or one.memory_bytes < front[-1].memory_bytes:
            front.append(one)
    return tuple(front)


def ranked(tried: Sequence[M], budget_bytes: int) -> tuple[M, ...]:
    """Those that fit, the fastest first; equally fast ones by memory, then as they were searched.

    Args:
        tried: in the order of the search.
        budget_bytes: of a device; 0: no limit.
    """
    fitting = [t for t in tried if not budget_bytes or t.memory_bytes <= budget_bytes]
    return tuple(sorted(fitting, key=_by_time))


def _by_time(one: Measured) -> tuple[float, int]:
    return one.seconds, one.memory_bytes
