"""The Pareto front, by comparing everything with everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polyshard_cli.plan.tuning.search import front_of, ranked


@dataclass(frozen=True)
class Point:
    """So many bytes and seconds; ``number`` tells equal ones apart."""

    memory_bytes: int
    seconds: float
    number: int


POINTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))).map(
    lambda pairs: [Point(m, float(s), i) for i, (m, s) in enumerate(pairs)]
)


def beats(one: Point, other: Point) -> bool:
    """No worse in both, and better in one; of equals, the one that came first."""
    ours, theirs = (one.memory_bytes, one.seconds), (other.memory_bytes, other.seconds)
    if ours == theirs:
        return one.number < other.number
    return ours[0] <= theirs[0] and ours[1] <= theirs[1]


@given(POINTS)
def test_the_front_is_what_nothing_beats(points: list[Any]) -> None:
    expected = {p for p in points if not any(beats(q, p) for q in points)}
    found = front_of(points)
    assert set(found) == expected
    assert len(found) == len(expected)
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)


@given(POINTS, st.integers(0, 9))
def test_the_best_is_the_fastest_that_fits(points: list[Any], budget: int) -> None:
    order: tuple[Any, ...] = ranked(points, budget)
    fitting = [p for p in points if not budget or p.memory_bytes <= budget]
    assert sorted(order, key=lambda p: p.number) == fitting
    if fitting:
        least = min(p.seconds for p in fitting)
        assert order[0].seconds == least
        assert order[0] in front_of(fitting)
