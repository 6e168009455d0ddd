"""``--offload`` of the demo: read as text, refused in one line, and made by the plugin."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from polyshard.errors import SettingError
from polyshard_demo import plugins
from polyshard_demo.errors import DemoError
from polyshard_demo.plugins import make_offload


@dataclass(frozen=True)
class FakeDiskSettings:
    path: object


@dataclass(frozen=True)
class FakeOffload:
    params: str = "device"
    grads: str = "device"
    optimizer: str = "device"
    fraction: float = 1.0
    disk: object = None

    def __post_init__(self) -> None:
        if self.params == "moon":
            raise SettingError("no such tier")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("polyshard_offload")
    module.Offload, module.DiskSettings = FakeOffload, FakeDiskSettings
    monkeypatch.setitem(sys.modules, "polyshard_offload", module)
    monkeypatch.setattr(plugins, "find_spec", lambda name: object())


def test_nothing_is_nothing() -> None:
    assert make_offload("") is None


def test_text_becomes_settings(installed: None) -> None:
    made: Any = make_offload("optimizer=disk, params=host,fraction=0.5,path=/scratch")
    assert (made.optimizer, made.params, made.fraction) == ("disk", "host", 0.5)
    assert str(made.disk.path) == "/scratch"


@pytest.mark.parametrize("text", ["disk", "optimiser=disk", "params=host,params=disk"])
def test_text_that_means_nothing_is_quoted(installed: None, text: str) -> None:
    with pytest.raises(DemoError, match=r"--offload .*: cannot read .*write each of params, grads"):
        make_offload(text)


@pytest.mark.parametrize("text", ["params=moon", "fraction=much"])
def test_refusals_of_the_plugin_are_passed_on(installed: None, text: str) -> None:
    with pytest.raises(DemoError, match=f"--offload {text}: "):
        make_offload(text)


def test_without_the_plugin_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match="pip install polyshard-offload"):
        make_offload("params=host")
