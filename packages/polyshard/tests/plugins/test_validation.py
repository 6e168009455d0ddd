"""Strict registration: every mistake of a plugin is reported, at once and by name."""

from __future__ import annotations

from typing import Any

import pytest
from toy_codecs import Codecs, GatherFactory
from toy_groups import GROUP
from toy_mistakes import Mistaken

from polyshard import Plugin, hookimpl
from polyshard.errors import PluginError
from polyshard.plugins.builtin import NativeCodec
from polyshard.plugins.contributions import GATHER_CODEC, REDUCE_CODEC
from polyshard.plugins.stack import build_stack
from polyshard.plugins.validation import problems_of

EXPECTED = [
    "'polyshard_observer' is not marked with @polyshard.hookimpl",
    "'polyshard_gather_codec' is not marked with @polyshard.hookimpl",
    "no hook is named 'polyshard_redcue_codec'; did you mean 'polyshard_reduce_codec'?",
    "'polyshard_shard_storage' takes 'gruop', which the hook does not have; did you mean 'group'?",
    "'polyshard_state_dict_adapter' gives 'group' a default",
    "'chunk_dtensor' takes 'tensor' keyword-only; take it plainly by name",
    "'polyshard_collectives_backend' sets wrapper",
    "'polyshard_collectives_backend' is a coroutine or generator",
]


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(PluginError) as caught:
        build_stack([Mistaken()])
    text = str(caught.value)
    for line in EXPECTED:
        assert f"plugin 'mistaken' (0): {line}" in text
    assert len(text.splitlines()) == len(EXPECTED)


class Ignored(Plugin):
    """What calling implementations one by one, in our own order, would pass over in silence."""

    name = "ignored"
    polyshard_gather_codec = "a codec"

    @hookimpl(tryfirst=True)
    def polyshard_observer(self, group: Any) -> None:
        """Asks pluggy for an order."""

    @hookimpl
    def polyshard_reduce_codec(self, group: Any) -> None:
        """One answer."""

    @hookimpl(specname="polyshard_reduce_codec")
    def another(self, group: Any) -> None:
        """And a second one."""

    @hookimpl
    async def polyshard_shard_storage(self, group: Any) -> None:
        """It is not awaited."""

    @hookimpl
    def polyshard_sharding_constraint(self, group: Any) -> Any:
        """It is not iterated."""
        yield None

    @hookimpl
    def pre_flatten_transform(self, tensor: Any) -> None:
        """Nothing undoes it."""


IGNORED = [
    "'polyshard_gather_codec' is a str and not a function",
    "'polyshard_observer' sets tryfirst; order is declared with before and after",
    "'another' and 'polyshard_reduce_codec' all implement 'polyshard_reduce_codec'",
    "'polyshard_shard_storage' is a coroutine or generator",
    "'polyshard_sharding_constraint' is a coroutine or generator",
    "it implements 'pre_flatten_transform' without 'post_unflatten_transform'",
]


def test_what_our_own_calling_would_ignore_is_reported() -> None:
    found = problems_of(Ignored())
    assert len(found) == len(IGNORED)
    for line in IGNORED:
        assert any(line in problem for problem in found), line


def test_a_property_is_not_a_hook_and_is_not_evaluated() -> None:
    class Lazy(Codecs):
        @property
        def polyshard_observer(self) -> None:
            raise AssertionError("evaluated")

    assert problems_of(Lazy()) == [
        "'polyshard_observer' is a property and not a function, so it would never be called"
    ]


def test_an_inherited_hook_may_be_turned_off() -> None:
    class Half(Codecs):
        polyshard_reduce_codec = None  # type: ignore[assignment]

    assert problems_of(Half()) == []
    found = build_stack([Half()]).contributions(GROUP)
    assert isinstance(found[GATHER_CODEC], GatherFactory)
    assert isinstance(found[REDUCE_CODEC], NativeCodec)


def test_everything_wrong_with_a_stack_is_listed_at_once() -> None:
    class Needy(Codecs):
        name = "needy"
        requires = ("absent",)

    with pytest.raises(PluginError) as caught:
        build_stack(["nowhere", "elsewhere", Mistaken()])
    text = str(caught.value)
    assert "named 'nowhere'" in text
    assert "named 'elsewhere'" in text
    assert all(line in text for line in EXPECTED)
    with pytest.raises(PluginError) as caught:
        build_stack([Needy(), Mistaken()])
    assert "'needy' requires 'absent'" in str(caught.value)
    assert all(line in str(caught.value) for line in EXPECTED)


def test_problems_of_the_plugin_itself() -> None:
    class Comparable(Plugin):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

        @hookimpl
        def polyshard_observer(self) -> None:
            """Nothing."""

    assert problems_of(Codecs) == ["it is a class; pass an instance, Codecs(...)"]
    assert any("overrides __eq__" in p for p in problems_of(Comparable()))
    assert any("implements no hook" in p for p in problems_of(Plugin()))
    assert problems_of(Codecs()) == []
