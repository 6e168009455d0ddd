"""Which of many settings no other beats in both memory and time, and which is the best."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard_plan.tuning.search import Tried

__all__ = ["front_of", "ranked"]


def front_of(tried: Sequence[Tried]) -> tuple[Tried, ...]:
    """The Pareto front, the fastest first: each of the others takes more memory or time.

    Of several that are equal in both, the first.
    """
    front: list[Tried] = []
    for one in sorted(tried, key=lambda t: (t.seconds, t.memory_bytes)):
        if not front or one.memory_bytes < front[-1].memory_bytes:
            front.append(one)
    return tuple(front)


def ranked(tried: Sequence[Tried], budget_bytes: int) -> tuple[Tried, ...]:
    """Those that fit, the fastest first; equally fast ones by memory, then as they were searched.

    Args:
        tried: in the order of the search.
        budget_bytes: of a device; 0: no limit.
    """
    fitting = [t for t in tried if not budget_bytes or t.memory_bytes <= budget_bytes]
    return tuple(sorted(fitting, key=lambda t: (t.seconds, t.memory_bytes)))
