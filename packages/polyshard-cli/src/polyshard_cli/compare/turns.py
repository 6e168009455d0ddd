"""What takes turns: each in another order every time, so that a busy machine is busy for all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

__all__ = ["in_turns", "median_of", "paired", "rotated"]

T = TypeVar("T")


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """All of ``items``, beginning with another one in each turn."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def in_turns(
    ways: Mapping[str, Callable[[int], T]], turns: int, warmup: int = 1
) -> dict[str, list[T]]:
    """Call each of ``ways`` with the number of the turn; what they return after the warm-up."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for turn in range(warmup + turns):
        for name in rotated(list(ways), turn):
            value = ways[name](turn)
            if turn >= warmup:
                found[name].append(value)
    return found


def median_of(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: statistics.median(values) for name, values in samples.items()}


def paired(own: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of single turns."""
    return statistics.median(a / b for a, b in zip(own, others, strict=True))
