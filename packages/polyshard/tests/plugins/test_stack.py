"""Building stacks: strict registration, contracts, order, discovery."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_codecs import Codecs, GatherFactory
from toy_groups import GROUP
from toy_mistakes import Mistaken
from toy_observers import Watching
from toy_planning import Constrained

from polyshard import HOOK_API, Contract, Plugin, hookimpl
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins import discovery
from polyshard.plugins.builtin import EnginePlugin, NativeReduceCodec
from polyshard.plugins.contract import contract_of, settings_of
from polyshard.plugins.ordering import check_relations, order
from polyshard.plugins.stack import build_stack
from polyshard.plugins.transforms import Onion
from polyshard.plugins.validation import hook_arguments, problems_of
from polyshard.seams import ParamInfo

EXPECTED = [
    "'polyshard_observer' is not marked with @polyshard.hookimpl",
    "'polyshard_gather_codec' is not marked with @polyshard.hookimpl",
    "no hook is named 'polyshard_redcue_codec'; did you mean 'polyshard_reduce_codec'?",
    "'polyshard_shard_storage' takes 'gruop', which the hook does not have; did you mean 'group'?",
    "'polyshard_state_dict_adapter' gives 'group' a default",
    "'chunk_dtensor' takes 'tensor' keyword-only; take it plainly by name",
    "'polyshard_collectives_backend' is a hook wrapper",
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
        """Nobody awaits it."""

    @hookimpl
    def polyshard_sharding_constraint(self, group: Any) -> Any:
        """Nobody iterates it."""
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
    assert isinstance(found.gather_codec, GatherFactory)
    assert isinstance(found.reduce_codec, NativeReduceCodec)


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


def test_requirements_are_not_blamed_when_a_plugin_could_not_be_loaded() -> None:
    class Needy(Codecs):
        requires = ("nowhere",)

    with pytest.raises(PluginError) as caught:
        build_stack(["nowhere", Needy()])
    assert "requires" not in str(caught.value)


def test_the_engine_keeps_its_name() -> None:
    class Posing(Codecs):
        name = "engine"

    with pytest.raises(PluginError, match="'engine' is the name of the built-in plugin"):
        build_stack([Posing()])


def test_errors_name_the_plugin_that_raised() -> None:
    class Raising(Plugin):
        name = "raising"
        version = "7"

        @hookimpl
        def polyshard_prepare_model(self) -> None:
            raise KeyError("plan")

    with pytest.raises(KeyError) as caught:
        build_stack([Raising()]).prepare(torch.nn.Identity(), None)  # type: ignore[arg-type]
    assert caught.value.__notes__ == ["raised by plugin 'raising' (7) in polyshard_prepare_model"]


def test_one_plugin_object_serves_many_stacks_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``fully_shard`` may be called a thousand times; looking through installed files may not."""

    class Plain:
        @hookimpl
        def polyshard_observer(self) -> None:
            """Nothing."""

    plugins = [Plain(), Codecs()]
    expected = build_stack(plugins).lines()

    def refuse() -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(importlib.metadata, "packages_distributions", refuse)
    assert {build_stack(plugins).lines() for _ in range(10)} == {expected}


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


@pytest.mark.parametrize("version", [(HOOK_API[0] + 1, 0), (0, 9), (HOOK_API[0], HOOK_API[1] + 1)])
def test_another_hook_api_is_refused_with_both_numbers(version: tuple[int, int]) -> None:
    class Written(Codecs):
        hook_api = version

    shown = f"{version[0]}.{version[1]}"
    with pytest.raises(PluginError, match=rf"hook API {shown}, this polyshard has 1\.0"):
        build_stack([Written()])


def test_modules_and_plain_objects_may_be_plugins() -> None:
    module = ModuleType("acme_plugin")

    @hookimpl
    def polyshard_observer(group: Any) -> None:
        """Nothing."""

    module.polyshard_observer = polyshard_observer  # type: ignore[attr-defined]
    assert contract_of(module).name == "acme_plugin"
    module.polyshard_contract = Contract("acme", "2")  # type: ignore[attr-defined]
    assert build_stack([module, Codecs()]).lines() == ("acme 2", "codecs 1.2")


def test_settings_are_part_of_the_plan() -> None:
    assert settings_of(Constrained(4)) == "elements=4"
    assert build_stack([Constrained(4)]).lines() == ("constrained 0 (elements=4)",)


def named(name: str, **kwargs: Any) -> Contract:
    relations: dict[str, Any] = {k: frozenset(v) for k, v in kwargs.items()}
    return Contract(name, **relations)


def test_relations() -> None:
    check_relations([named("a", requires=["fast"]), named("b", provides=["fast"])])
    with pytest.raises(PluginError, match=r"'a' requires 'slow'.*present: a, b, fast.*add one"):
        check_relations([named("a", requires=["slow"]), named("b", provides=["fast"])])
    with pytest.raises(ConflictError, match=r"'a' conflicts with 'b' \(declared by 'a': fast\)"):
        check_relations([named("b", provides=["fast"]), named("a", conflicts_with=["fast"])])
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
    assert order(contracts) == ["b", "c", "a"]


def test_circles_are_shown() -> None:
    circle = [named("a", before=["b"]), named("b", before=["c"]), named("c", before=["a"])]
    with pytest.raises(
        ConflictError, match=r"(a before b before c|b before c before a|c before a)"
    ):
        order([*circle, named("z", after=["a"])])


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
    ordered = order(contracts)
    shuffled = list(contracts)
    random.shuffle(shuffled)
    assert order(shuffled) == ordered
    for contract in contracts:
        place = ordered.index(contract.name)
        assert all(place < ordered.index(name) for name in contract.before)
        assert all(place > ordered.index(name) for name in contract.after)


def install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    points = tuple(EntryPoint(name, value, discovery.ENTRY_POINTS) for name, value in entries)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **kwargs: points)


def test_names_resolve_through_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("codecs", "toy_codecs:Codecs"), ("watching", "toy_observers:Watching"))
    assert build_stack(["codecs", Watching()]).lines() == ("codecs 1.2", "watching 0")
    with pytest.raises(
        PluginError, match=r"named 'codec'\. Did you mean 'codecs'\? Installed: codecs, w"
    ):
        build_stack(["codec"])


def test_the_order_of_entry_points_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [("codecs", "toy_codecs:Codecs"), ("watching", "toy_observers:Watching")]
    lines = set()
    for installed in (entries, entries[::-1]):
        install(monkeypatch, *installed)
        for names in (["codecs", "watching"], ["watching", "codecs"]):
            lines.add(build_stack(names).lines())
    assert len(lines) == 1


def test_broken_entry_points_name_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        ("twice", "toy_codecs:Codecs"),
        ("twice", "toy_observers:Watching"),
        ("gone", "no_such_module:x"),
        ("needy", "toy_planning:Constrained"),
    )
    with pytest.raises(PluginError, match=r"'twice' is provided by .* and .*Uninstall one"):
        build_stack(["twice"])
    with pytest.raises(PluginError, match=r"'gone'.*no_such_module:x.*ModuleNotFoundError"):
        build_stack(["gone"])
    with pytest.raises(PluginError, match=r"'needy'.*without defaults, pass an object"):
        build_stack(["needy"])


def test_an_onion_layer_must_be_undoable() -> None:
    class Forgetful:
        name = "forgetful"
        settings = ""

        def flatten(
            self, tensor: torch.Tensor, param: ParamInfo | None
        ) -> tuple[torch.Tensor, None]:
            return tensor.clone(), None

        def unflatten(
            self, tensor: torch.Tensor, param_extension: Any, param: ParamInfo | None
        ) -> torch.Tensor:
            return tensor

    info: Any = ParamInfo("w", (2,), torch.float32, True, None, torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"'forgetful'.*changed 'w'.*no extension"):
        Onion([Forgetful()]).flatten(torch.ones(2), info)


def test_hooks_of_torch_keep_their_arguments() -> None:
    """The six mirror ``FSDPExtensions``: same names, same arguments, and ``param``."""
    import inspect

    from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions

    ours = hook_arguments()
    for name in FSDPExtensions.__abstractmethods__:
        theirs = tuple(inspect.signature(getattr(FSDPExtensions, name)).parameters)[1:]
        assert ours[name][: len(theirs)] == theirs
        assert ours[name][len(theirs) :] == ("param",)


def test_the_engines_own_plugin_has_no_problems() -> None:
    """Stacks do not look: it is in every one."""
    assert problems_of(EnginePlugin()) == []


def test_stacks_share_the_engine_and_are_traced_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = build_stack([])
    monkeypatch.setenv("POLYSHARD_TRACE", "1")
    traced = build_stack([Codecs()])
    silent.contributions(GROUP)
    assert capsys.readouterr().err == ""
    traced.contributions(GROUP)
    assert "'engine'" in capsys.readouterr().err
    monkeypatch.delenv("POLYSHARD_TRACE")
    build_stack([]).contributions(GROUP)
    assert capsys.readouterr().err == ""
