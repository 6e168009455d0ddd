"""Offsets are right within what they say, on clocks that are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyshard_cli.trace.clocks.offset import Offset, Timeline, best_of

MS = 1_000_000


@dataclass
class Two:
    """Two clocks over one true time, and messages that take a while; all in nanoseconds."""

    ahead_ns: int
    faster: float = 0.0
    seed: int = 0
    true_ns: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def own(self) -> int:
        return round(self.true_ns * (1 + self.faster)) + self.ahead_ns

    def ask(self) -> int:
        self.true_ns += self.random.randrange(1, 5 * MS)  # there
        answer = self.true_ns
        self.true_ns += self.random.randrange(1, 5 * MS)  # and back: as unequal as can be
        return answer


@given(st.integers(-(10**15), 10**15), st.integers(0, 10**6), st.integers(1, 20))
def test_the_truth_is_within_the_uncertainty(ahead_ns: int, seed: int, rounds: int) -> None:
    two = Two(ahead_ns, seed=seed)
    found = best_of(two.ask, two.own, rounds)
    assert abs(found.offset_ns + ahead_ns) <= found.uncertainty_ns
    assert found.uncertainty_ns <= 5 * MS


def test_more_round_trips_say_more() -> None:
    few, many = (best_of((t := Two(7, seed=3)).ask, t.own, n).uncertainty_ns for n in (1, 64))
    assert many < few / 2


@given(st.integers(-(10**12), 10**12), st.floats(-1e-4, 1e-4), st.integers(0, 10**6))
def test_drift_between_two_offsets_is_taken_out(ahead_ns: int, faster: float, seed: int) -> None:
    two = Two(ahead_ns, faster, seed)
    first = best_of(two.ask, two.own, 16)
    moments = []
    for _ in range(10):
        two.true_ns += 60_000 * MS
        moments.append((two.own(), two.true_ns))
    line = Timeline([first, best_of(two.ask, two.own, 16)])
    for own, true in moments:  # 100 ppm over ten minutes are 60 ms
        # The clock itself is off by a microsecond at most while a message is on its way.
        assert abs(line.reference_ns(own) - true) <= line.uncertainty_ns + 1000
    assert line.drift == pytest.approx(-faster, abs=2 * line.uncertainty_ns / (600_000 * MS))


def test_times_outside_of_the_offsets_follow_the_nearest_two() -> None:
    line = Timeline([Offset(100, 0, 1), Offset(200, 10, 2), Offset(300, 10, 1)])
    assert [line.reference_ns(at) for at in (0, 100, 150, 200, 250, 300, 400)] == [
        *(-10, 100, 155, 210, 260, 310, 410)
    ]
    assert Timeline([Offset(5, 7, 0)]).reference_ns(100) == 107
    assert line.uncertainty_ns == 2
