"""Relations between plugins, and the order that follows from them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_codecs import Codecs

from polyshard import Contract
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins.contract import in_order, problems_between
from polyshard.plugins.stack import build_stack


def named(name: str, **kwargs: Any) -> Contract:
    relations: dict[str, Any] = {k: frozenset(v) for k, v in kwargs.items()}
    return Contract(name, **relations)


def test_relations() -> None:
    fast = named("b", provides=["fast"])
    assert list(problems_between([named("a", requires=["fast"]), fast])) == []
    (missing,) = problems_between([named("a", requires=["slow"]), fast])
    assert re.search(r"'a' requires 'slow'.*present: a, b, fast.*add one", str(missing))
    (conflict,) = problems_between([fast, named("a", conflicts_with=["fast"])])
    assert isinstance(conflict, ConflictError)
    assert "'a' conflicts with 'b' (declared by 'a': fast)" in str(conflict)
    pattern = (
        r"2 plugins are named 'codecs': toy_codecs\.Codecs \(1\.2\) and toy_codecs\.Codecs "
        r"\(1\.2\); pass one of them"
    )
    with pytest.raises(PluginError, match=pattern):
        build_stack([Codecs(), Codecs()])
    with pytest.raises(PluginError, match=r"takes a list, got the string 'codecs'"):
        build_stack("codecs")


def test_order_by_declaration_then_name() -> None:
    contracts = [named("b"), named("a", after=["c"]), named("c", after=["absent"])]
    assert in_order(contracts) == ["b", "c", "a"]


def test_circles_are_shown() -> None:
    circle = [named("a", before=["b"]), named("b", before=["c"]), named("c", before=["a"])]
    (problem,) = problems_between([*circle, named("z", after=["a"])])
    assert isinstance(problem, ConflictError)
    assert "a before b before c before a" in str(problem)


@st.composite
def acyclic(draw: st.DrawFn) -> list[Contract]:
    names = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1))
    rank = {name: i for i, name in enumerate(draw(st.permutations(names)))}
    contracts = []
    for name in names:
        others = draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
        contracts.append(
            named(
                name,
                before=[o for o in others if rank[o] > rank[name]],
                after=[o for o in others if rank[o] < rank[name]],
            )
        )
    return contracts


@given(acyclic(), st.randoms())
def test_order_respects_declarations_and_ignores_registration(
    contracts: list[Contract], random: Any
) -> None:
    ordered = in_order(contracts)
    shuffled = list(contracts)
    random.shuffle(shuffled)
    assert in_order(shuffled) == ordered
    for contract in contracts:
        place = ordered.index(contract.name)
        assert all(place < ordered.index(name) for name in contract.before)
        assert all(place > ordered.index(name) for name in contract.after)
