"""Who does what: claims of exclusive roles, and answers that fit no seam."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_codecs import Codecs
from toy_groups import GROUP, contributions
from toy_landing import Landing
from toy_storage import Resting

from polyshard import (
    CollectivesBackend,
    GatherCodec,
    Plugin,
    ReduceCodec,
    StorageFactory,
    describe,
    fully_shard,
    hookimpl,
)
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins import contributions as roles
from polyshard.plugins.seams import GradientLanding, GroupInfo
from polyshard.plugins.stack import build_stack
from polyshard_testing import ranks

ROLES = {
    "polyshard_shard_storage": "the shard storage",
    "polyshard_collectives_backend": "the collectives",
    "polyshard_gather_codec": "the gather codec",
    "polyshard_reduce_codec": "the reduce codec",
    "polyshard_gradient_landing": "the gradient landing",
}
SEAMS = (
    *ROLES,
    "polyshard_sharding_constraint",
    "polyshard_observer",
    "polyshard_state_dict_adapter",
)


class Everything(GatherCodec, ReduceCodec, StorageFactory, CollectivesBackend, GradientLanding):
    """A spec of every exclusive seam."""

    name: str = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(self, group: Any, layout: Any) -> Any:
        """Nothing."""

    def owners(self, group: Any) -> Any:
        """Of a landing."""


def claiming(name: str, hooks: frozenset[str]) -> Plugin:
    """A plugin that claims some roles, and stays out of the others in as many words."""

    def answer(hook: str) -> Any:
        value = Everything(name) if hook in hooks else None

        def implementation(self: Any, group: GroupInfo) -> object:
            return value

        return hookimpl(implementation)

    made: Any = type(name, (Plugin,), {"name": name, **{hook: answer(hook) for hook in ROLES}})
    plugin: Plugin = made()
    return plugin


wanted = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]), st.frozensets(st.sampled_from(list(ROLES)), max_size=2)
)


@given(wanted, st.randoms())
def test_claims_resolve_alike_in_any_order(claims: dict[str, frozenset[str]], random: Any) -> None:
    owners = {hook: sorted(n for n, hooks in claims.items() if hook in hooks) for hook in ROLES}
    contested = {hook for hook, names in owners.items() if len(names) > 1}
    names = list(claims)
    random.shuffle(names)
    stack = build_stack([claiming(name, claims[name]) for name in names])
    if contested:
        with pytest.raises(ConflictError) as caught:
            stack.contributions(GROUP)
        lines = str(caught.value).splitlines()
        assert len(lines) == len(contested)
        for hook in contested:
            parties = " and ".join(f"'{name}' (0)" for name in owners[hook])
            assert any(f"{parties} both claim {ROLES[hook]}" in line for line in lines)
        return
    found = stack.contributions(GROUP)
    for role in roles.ROLES:
        answer = found[role]
        assert isinstance(answer, Everything) == bool(owners[role.hook])
        if owners[role.hook]:
            assert answer.name == owners[role.hook][0]


@pytest.mark.parametrize("hook", list(ROLES))
def test_exclusive_roles_name_both_plugins_and_the_parameters(hook: str) -> None:
    both = [Codecs(), Resting(), Landing()]
    others = [type("Rival", (type(p),), {"name": f"rival_{p.name}"})() for p in both]
    with pytest.raises(ConflictError) as caught:
        contributions(*both, *others)
    (line,) = [text for text in str(caught.value).splitlines() if ROLES[hook] in text]
    assert "both claim" in line
    assert "group 'block' (w)" in line
    assert "'rival_" in line
    assert "Pass only one" in line


@pytest.mark.parametrize("hook", SEAMS)
def test_answers_that_do_not_fit_are_refused(hook: str) -> None:
    def answering(value: object) -> Plugin:
        def implementation(self: Any, group: GroupInfo) -> object:
            return value

        odd: Any = type("Odd", (Plugin,), {"name": "odd", hook: hookimpl(implementation)})
        made: Plugin = odd()
        return made

    with pytest.raises(PluginError, match=rf"'odd' \(0\): {hook} returned the class int; return"):
        contributions(answering(int))
    with pytest.raises(
        PluginError, match=rf"{hook} returned a str, which is no .* inherit from polyshard\.[A-Z]"
    ):
        contributions(answering("gather"))


class Unbound(GatherCodec, ReduceCodec, StorageFactory, CollectivesBackend):
    """A codec, a storage and a backend whose products have nothing to them."""

    name = "empty"

    def bind(self, group: Any, layout: Any) -> Any:
        return object()


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("polyshard_gather_codec", r"Unbound\.bind .*is no BoundGatherCodec; inherit from polysh"),
        ("polyshard_reduce_codec", r"Unbound\.bind .*returned an? .*is no BoundReduceCodec"),
        ("polyshard_shard_storage", r"Unbound\.bind .*returned .*is no ShardStorage"),
        ("polyshard_collectives_backend", r"Unbound\.bind .*no Transport.*polyshard\.transport"),
    ],
)
@ranks(1)
def test_what_factories_make_is_checked_too(rank: int, size: int, hook: str, words: str) -> None:
    def implementation(self: Any, group: GroupInfo) -> object:
        return Unbound()

    odd: Any = type("Odd", (Plugin,), {"name": "odd", hook: hookimpl(implementation)})
    with pytest.raises(PluginError, match=words):
        describe(fully_shard(torch.nn.Linear(2, 2), plugins=[odd()]))
