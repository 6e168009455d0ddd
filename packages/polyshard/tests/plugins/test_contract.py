"""What plugins declare: contracts that cannot be misread, settings that ranks can compare."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from toy_codecs import Codecs
from toy_planning import Constrained

from polyshard import HOOK_API, Contract, Plugin, hookimpl
from polyshard.errors import PluginError
from polyshard.plugins.contract import contract_of, settings_of
from polyshard.plugins.stack import build_stack


class Minimal(Plugin):
    name = "minimal"

    @hookimpl
    def polyshard_prepare_model(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("relation", ["provides", "requires", "conflicts_with", "before", "after"])
def test_a_bare_string_is_not_several_names(relation: str) -> None:
    """Its letters would each become a name."""
    wanted = rf"plugin 'minimal': {relation} takes several names, got 'tp'; write {relation} = \("
    declaring: Any = type("Declaring", (Minimal,), {relation: "tp"})
    with pytest.raises(PluginError, match=wanted):
        build_stack([declaring()])
    fields: dict[str, Any] = {relation: "tp"}
    with pytest.raises(PluginError, match=wanted):
        Contract("minimal", **fields)


def test_relations_may_be_any_collection() -> None:
    names: Any = ["b", "a"]
    assert Contract("x", after=names).after == frozenset("ab")


@pytest.mark.parametrize("name", ["", None])
def test_names_are_texts(name: Any) -> None:
    with pytest.raises(PluginError, match="must be a text that is not empty"):
        Contract(name)


@pytest.mark.parametrize("version", ["1.0", 1, (1,)])
def test_malformed_api_versions_are_refused(version: Any) -> None:
    with pytest.raises(PluginError, match=r"'x': hook_api must be two integers such as \(1, 1\)"):
        Contract("x", hook_api=version)


def test_something_else_in_the_place_of_a_contract_is_refused() -> None:
    class Declaring:
        polyshard_contract = {"name": "x"}  # noqa: RUF012

        @hookimpl
        def polyshard_prepare_model(self) -> None:
            """Nothing."""

    with pytest.raises(PluginError, match=r"'Declaring': its polyshard_contract is a dict"):
        build_stack([Declaring()])


def test_an_error_inside_a_contract_is_not_taken_for_its_absence() -> None:
    class Broken:
        @property
        def polyshard_contract(self) -> Contract:
            return Contract(self.no_such_attribute)  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no_such_attribute"):
        contract_of(Broken())


def test_undeclared_plugins_are_named_after_what_they_are() -> None:
    assert contract_of(Minimal()) == Contract("minimal", hook_api=HOOK_API)
    assert contract_of(Minimal).name == "Minimal"
    assert contract_of(ModuleType("acme.sharding")).name == "sharding"
    with pytest.raises(PluginError, match=r"'Minimal' .*it is a class; pass an instance, Minimal"):
        build_stack([Minimal])


@dataclass(frozen=True)
class Block:
    elements: int
    kinds: frozenset[str] = frozenset({"alpha", "beta", "gamma", "delta"})


@dataclass(frozen=True, eq=False)
class Settings(Minimal):
    block: Block = Block(4)
    plan: dict[str, Any] = field(default_factory=lambda: {"w": {"x", "y", "z"}, "b": (1,)})
    choose: Any = settings_of
    plain: Any = field(default_factory=object)
    dtype: torch.dtype = torch.int8
    secret: str = field(default="hidden", repr=False)


EXPECTED = (
    "block=Block(elements=4, kinds={'alpha', 'beta', 'delta', 'gamma'}), "
    "plan={'w': {'x', 'y', 'z'}, 'b': (1,)}, choose=<function settings_of>, "
    "plain=<object object>, dtype=torch.int8"
)


def test_settings_are_equal_text_for_equal_settings() -> None:
    assert settings_of(Settings()) == EXPECTED
    assert settings_of(Settings) == ""
    assert settings_of(Minimal()) == ""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_settings_do_not_depend_on_the_process(seed: str) -> None:
    """Every rank hashes strings its own way; a plan must not differ for that."""
    program = (
        "from dataclasses import make_dataclass\n"
        "from polyshard.plugins.contract import settings_of\n"
        "S = make_dataclass('S', ['words', 'made'])\n"
        "print(settings_of(S({'alpha', 'beta', 'gamma', 'delta'}, object())))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "words={'alpha', 'beta', 'delta', 'gamma'}, made=<object object>\n"


@pytest.mark.parametrize("version", [(HOOK_API[0] + 1, 0), (0, 9), (HOOK_API[0], HOOK_API[1] + 1)])
def test_another_hook_api_is_refused_with_both_numbers(version: tuple[int, int]) -> None:
    class Written(Codecs):
        hook_api = version

    shown = f"{version[0]}.{version[1]}"
    with pytest.raises(PluginError, match=rf"hook API {shown}, this polyshard has 1\.1"):
        build_stack([Written()])


def test_settings_are_part_of_the_plan() -> None:
    assert settings_of(Constrained(4)) == "elements=4"
    assert build_stack([Constrained(4)]).lines() == ("constrained 0 (elements=4)",)
