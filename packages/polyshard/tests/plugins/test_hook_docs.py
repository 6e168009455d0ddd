"""Every hook is documented with its exact arguments, and tested."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from polyshard import fsdp1
from polyshard.plugins import hookspecs
from polyshard.plugins.contract import Contract
from polyshard.plugins.contributions import ROLES
from polyshard.plugins.validation import hook_arguments

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parents[2]
HOOKS = list(hook_arguments())
TESTED_IN = [*TESTS.glob("helpers/toy_*.py"), TESTS / "test_fsdp1.py"]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_say_when_what_how_and_who(hook: str) -> None:
    text = inspect.getdoc(getattr(hookspecs, hook)) or ""
    is_exclusive = hook in {role.hook for role in ROLES}  # the module says the rest, for all five
    for term in ("When: ", "Return: ", *(() if is_exclusive else ("Combine: ", "Ranks: "))):
        assert f"\n{term}" in text


def test_the_generated_pages_are_current() -> None:
    from make_hook_docs import files

    for page, text in files().items():
        assert page.read_text(encoding="utf-8") == text


def test_the_picture_names_hooks_that_exist() -> None:
    picture = (ROOT / "docs" / "assets" / "hooks.svg").read_text(encoding="utf-8")
    named = set(re.findall(r">((?:polyshard_|pre_|post_)\w+)</text>", picture))
    assert len(named) > 6
    assert named <= set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_documented_with_their_arguments(hook: str) -> None:
    page = (ROOT / "docs" / "reference" / "hooks.md").read_text(encoding="utf-8")
    assert f"`{hook}({', '.join(hook_arguments()[hook])})`" in page


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_implemented_in_a_test(hook: str) -> None:
    assert any(f"def {hook}(" in path.read_text("utf-8") for path in TESTED_IN)


def test_every_field_of_a_contract_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "contract.md").read_text(encoding="utf-8")
    table = page.partition("| field |")[2].partition("\n\n")[0]
    for field in dataclasses.fields(Contract):
        assert f"`{field.name}`" in table, f"{field.name} is not in the table of contract.md"


def test_pages_name_all_that_crosses_the_bridge_to_fsdp1() -> None:
    page = (ROOT / "docs" / "how-to" / "fsdp1.md").read_text(encoding="utf-8")
    for name in fsdp1.__all__:
        if not inspect.isclass(getattr(fsdp1, name)):
            assert f"`{name}" in page, name
