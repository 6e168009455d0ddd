"""Building stacks: what may be a plugin, and who is named when one raises."""

from __future__ import annotations

import importlib.metadata
from types import ModuleType
from typing import Any

import pytest
import torch
from toy_codecs import Codecs

from polyshard import Contract, Plugin, hookimpl
from polyshard.errors import PluginError
from polyshard.plugins.contract import contract_of
from polyshard.plugins.stack import build_stack


def test_requirements_are_not_blamed_when_a_plugin_could_not_be_loaded() -> None:
    class Needy(Codecs):
        requires = ("nowhere",)

    with pytest.raises(PluginError) as caught:
        build_stack(["nowhere", Needy()])
    assert "requires" not in str(caught.value)


def test_the_engine_keeps_its_name() -> None:
    class Posing(Codecs):
        name = "engine"

    with pytest.raises(PluginError, match=r"'engine' is the name of the engine; rename"):
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

    def refuse(name: str) -> str:
        raise AssertionError("searched again")

    monkeypatch.setattr(importlib.metadata, "version", refuse)
    assert {build_stack(plugins).lines() for _ in range(10)} == {expected}


def test_a_version_is_that_of_the_distribution_named_like_the_package() -> None:
    class OfPluggy(Plugin):
        __module__ = "pluggy.hooks"

    assert contract_of(OfPluggy()).version == importlib.metadata.version("pluggy")
    OfPluggy.__module__ = "__main__"
    assert contract_of(OfPluggy()).version == "0"


def test_modules_and_plain_objects_may_be_plugins() -> None:
    module = ModuleType("acme_plugin")

    @hookimpl
    def polyshard_observer(group: Any) -> None:
        """Nothing."""

    module.polyshard_observer = polyshard_observer  # type: ignore[attr-defined]
    assert contract_of(module).name == "acme_plugin"
    module.polyshard_contract = Contract("acme", "2")  # type: ignore[attr-defined]
    assert build_stack([module, Codecs()]).lines() == ("acme 2", "codecs 1.2")
