"""The order of a step: what is expected, what came before, and how long either is remembered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyshard.engine.step import FORWARDS, StepOrder

UNITS = ("root", "a", "b", "c")


def forward(
    order: StepOrder[str], entered: Sequence[str], caller: str = "root"
) -> list[str | None]:
    """One call from outside; units leave as they entered. What was expected after each."""
    order.begin(caller)
    expected = [order.enter(unit) for unit in entered]
    for unit in entered:
        order.leave(unit)
    order.end()
    return expected


def test_the_first_forward_records_and_later_ones_follow() -> None:
    order: StepOrder[str] = StepOrder()
    assert forward(order, ["a", "b", "a", "c"]) == [None] * 4
    assert forward(order, ["a", "b", "a", "c"]) == ["b", "a", "c", None]


def test_a_departure_ends_expectation_and_is_the_next_record() -> None:
    order: StepOrder[str] = StepOrder()
    forward(order, ["a", "b", "c"])
    assert forward(order, ["a", "c", "b"]) == ["b", None, None]
    assert forward(order, ["a", "c", "b", "b"]) == ["c", "b", None, None]
    assert forward(order, ["a"]) == ["c"]
    assert forward(order, ["a"]) == [None]


def test_what_follows_is_told_in_any_number() -> None:
    order: StepOrder[str] = StepOrder()
    forward(order, ["a", "b", "c"])
    order.begin("root")
    order.enter("a")
    assert [list(order.following(count)) for count in range(4)] == [
        [],
        ["b"],
        ["b", "c"],
        ["b", "c"],
    ]
    order.enter("c")
    assert not order.following(2), "it departed from the record"


def test_every_caller_has_a_record_of_its_own() -> None:
    order: StepOrder[str] = StepOrder()
    forward(order, ["a", "b"])
    forward(order, ["a", "c"], caller="a")
    assert forward(order, ["a", "b"]) == ["b", None]
    assert forward(order, ["a", "c"], caller="a") == ["c", None]
    assert set(order.recorded()) == {"a", "b", "c"}


def test_it_is_said_whether_a_forward_was_as_the_last_one() -> None:
    order: StepOrder[str] = StepOrder()
    found = []
    for entered in (["a"], ["a"], ["b"], ["b"]):
        order.begin("root")
        for unit in entered:
            order.enter(unit)
        found.append(order.end())
    assert found == [True, False, True, False]
    assert not order.end(), "nothing is under way"


def test_a_forward_that_failed_leaves_the_record_as_it_was() -> None:
    order: StepOrder[str] = StepOrder()
    forward(order, ["a", "b", "c"])
    order.begin("root")
    order.enter("b")
    order.leave("b")
    order.reset()
    assert order.before("b") is None
    assert not order.end()
    assert forward(order, ["a", "b", "c"]) == ["b", "c", None]


def test_what_was_recorded_is_forgotten() -> None:
    order: StepOrder[str] = StepOrder()
    forward(order, ["a", "b"])
    order.forget()
    assert forward(order, ["a", "b"]) == [None, None]
    assert forward(order, ["a", "b"]) == ["b", None]


def test_a_backward_takes_the_notes_of_several_forwards_latest_first() -> None:
    order: StepOrder[str] = StepOrder()
    forward(order, ["a", "b", "root"])
    forward(order, ["a", "c", "root"])
    taken = [order.before(unit) for unit in ("root", "c", "a", "root", "b", "a", "a")]
    assert taken == ["c", "a", "root", "b", "a", None, None]


def test_what_came_before_is_told_without_taking_a_note() -> None:
    order: StepOrder[str] = StepOrder()
    forward(order, ["a", "b", "c", "root"])
    for _ in range(2):
        assert list(order.preceding("c", 1)) == ["b"]
        assert list(order.preceding("c", 5)) == ["b", "a"]
    assert not order.preceding("a", 2)
    assert order.before("c") == "b"
    assert not order.preceding("c", 2), "its note was taken"


def test_notes_are_taken_until_the_iteration_ends() -> None:
    order: StepOrder[str] = StepOrder()
    forward(order, ["a", "b"])
    order.end_step()
    assert order.before("b") is None
    assert not order.preceding("b", 1)
    assert forward(order, ["a", "b"]) == ["b", None], "records stay"


@pytest.mark.parametrize("forwards", [FORWARDS, 10 * FORWARDS + 3])
def test_forwards_without_a_backward_are_forgotten_oldest_first(forwards: int) -> None:
    order: StepOrder[str] = StepOrder()
    for _ in range(forwards):
        forward(order, ["a", "b", "c"])
    for _ in range(FORWARDS // 2):
        assert order.before("c") == "b"
        assert order.before("b") == "a"
        assert order.before("a") in ("c", None)
    left = 0
    while order.before("c") is not None:
        left += 1
    assert left <= FORWARDS // 2


Steps = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.lists(st.sampled_from(UNITS), max_size=5)),
        st.tuples(st.just("before"), st.sampled_from(UNITS)),
        st.tuples(st.just("end_step"), st.none()),
    ),
    max_size=40,
)


@given(Steps)
def test_notes_are_those_of_a_plain_list(steps: Sequence[tuple[str, object]]) -> None:
    """The oracle keeps every note with a mark of whether it was taken, and searches."""
    order: StepOrder[str] = StepOrder()
    notes: list[str] = []
    free: set[int] = set()
    for kind, what in steps:
        if kind == "forward":
            assert isinstance(what, list)
            forward(order, what)
            free.update(range(len(notes), len(notes) + len(what)))
            notes.extend(what)
        elif kind == "end_step":
            order.end_step()
            notes.clear()
            free.clear()
        else:
            assert isinstance(what, str)
            places = [place for place in free if notes[place] == what]
            wanted: str | None = None
            if places:
                place = max(places)
                free.discard(place)
                wanted = notes[place - 1] if place else None
            assert order.before(what) == wanted
