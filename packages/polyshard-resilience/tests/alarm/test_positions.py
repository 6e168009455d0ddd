"""A circle of ranks that wait in vain is found, and nothing else is taken for one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polyshard_resilience.alarm.positions import Position, circle_from
from polyshard_resilience.alarm.reports import NOBODY

KEY = "wire:1"


def waits(
    peer: int, *, for_count: int = 1, posted: int = 0, wait: int = 1, beat: int = 1
) -> Position:
    return Position(wait, beat, peer, KEY, for_count, {KEY: posted}, f"waits for {peer}")


def test_two_that_wait_for_each_other() -> None:
    at = {0: waits(1), 1: waits(0)}
    circle = circle_from(0, at.get)
    assert circle is not None
    assert set(circle.positions) == {0, 1}
    assert "rank 0 waits for 1; rank 1 waits for 0" in circle.describe()


def test_a_message_under_way_was_begun() -> None:
    at = {0: waits(1), 1: waits(0, posted=1)}
    assert circle_from(0, at.get) is None


def test_a_rank_that_computes_ends_the_chain() -> None:
    assert circle_from(0, {0: waits(1), 1: waits(2)}.get) is None


def test_who_waits_for_a_circle_finds_it() -> None:
    at = {0: waits(1), 1: waits(2), 2: waits(1)}
    circle = circle_from(0, at.get)
    assert circle is not None
    assert set(circle.positions) == {1, 2}


def test_a_circle_is_believed_at_the_second_look() -> None:
    at = {0: waits(1), 1: waits(0)}
    circle = circle_from(0, at.get)
    assert circle is not None
    assert circle.still_stands(at.get) is None  # no rank has said that it still waits
    assert circle.still_stands({r: waits(1 - r, beat=2) for r in at}.get) is True
    assert circle.still_stands({0: waits(1, beat=2), 1: waits(0, wait=2, beat=2)}.get) is False
    assert circle.still_stands({0: waits(1, beat=2)}.get) is False


def gathers(key: str, *begun: str) -> Position:
    """Waits for both of two ranks at ``key``, after having come to ``begun``."""
    posted = dict.fromkeys((key, *begun), 1)
    return Position(1, 1, NOBODY, key, 1, posted, f"is at {key}", among=(0, 1))


def test_two_that_wait_for_all_at_different_places() -> None:
    at = {0: gathers("one"), 1: gathers("other")}
    assert circle_from(0, at.get) is None
    circle = circle_from(0, at.get, candidate=1)
    assert circle is not None
    assert set(circle.positions) == {0, 1}


def test_one_that_waits_for_all_and_was_where_the_other_is() -> None:
    at = {0: gathers("one"), 1: gathers("other", "one")}
    for rank in at:
        assert circle_from(rank, at.get, candidate=1 - rank) is None
    assert circle_from(0, {0: gathers("one"), 1: gathers("one")}.get, candidate=1) is None


@given(st.data())
def test_only_ranks_that_cannot_go_on(data: st.DataObject) -> None:
    """Against simulating: a rank continues once the transfer it awaits has been begun."""
    size = data.draw(st.integers(2, 6))
    at = {}
    for rank in range(size):
        if data.draw(st.booleans()):
            peer = (rank + data.draw(st.integers(1, size - 1))) % size
            at[rank] = waits(peer, posted=data.draw(st.integers(0, 1)))
    stuck = set(at)
    moved = True
    while moved:
        free = {r for r in stuck if at[r].peer not in stuck or at[at[r].peer].has_begun(at[r])}
        moved, stuck = bool(free), stuck - free
    for rank in range(size):
        circle = circle_from(rank, at.get)
        assert (circle is not None) == (rank in stuck)
        if circle is not None:
            assert set(circle.positions) <= stuck


def test_as_text() -> None:
    at = waits(3, for_count=2, posted=7)
    assert Position.decode(at.encode()) == at
