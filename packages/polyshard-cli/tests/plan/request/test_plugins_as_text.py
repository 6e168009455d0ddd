"""Plugins as text, ``--quantize`` and ``--offload``: read, refused in one line, and made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyshard.errors import SettingError
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.request import plugins
from polyshard_cli.plan.request.plugins import offloading, quantizing

PLAIN, COARSE = SimpleNamespace(needs_feedback=False), SimpleNamespace(needs_feedback=True)


@dataclass(frozen=True)
class FakeOffload:
    params: str = "device"
    grads: str = "device"
    optimizer: str = "device"
    fraction: float = 1.0
    disk: Any = None

    def __post_init__(self) -> None:
        if self.params == "moon":
            raise SettingError("no such tier")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the plugins."""
    package = SimpleNamespace(
        QuantizedComm=lambda **keywords: keywords,
        ErrorFeedback=lambda: "feedback",
        format_names=lambda: ("plain", "coarse"),
        format_named={"plain": PLAIN, "coarse": COARSE}.__getitem__,
        Offload=FakeOffload,
        DiskSettings=lambda path: path,
    )
    monkeypatch.setattr(plugins, "find_spec", lambda name: object())
    monkeypatch.setattr(plugins, "import_module", lambda name: package)


@pytest.mark.parametrize("text", ["int9", "plain,int9,plain", "", "plain plain"])
def test_formats_that_are_not_known(installed: None, text: str) -> None:
    with pytest.raises(PlanError, match=r"no format is called .* Known: plain, coarse, native"):
        quantizing(text)


@pytest.mark.parametrize("text", ["native,native", "native", "plain,plain,plain"])
def test_formats_that_say_nothing_or_too_much(installed: None, text: str) -> None:
    with pytest.raises(PlanError, match=f"--quantize {text}: give one format, or two"):
        quantizing(text)


def test_formats_reach_the_plugin(installed: None) -> None:
    both = {"weights": PLAIN, "gradients": PLAIN, "error_feedback": None}
    one = {"weights": None, "gradients": COARSE, "error_feedback": "feedback"}
    assert (quantizing("plain"), quantizing("native, coarse")) == (both, one)


def test_tiers_reach_the_plugin(installed: None) -> None:
    made = offloading("optimizer=disk, params=host,fraction=0.5,path=/scratch")
    assert made == FakeOffload("host", optimizer="disk", fraction=0.5, disk=Path("/scratch"))


@pytest.mark.parametrize("text", ["disk", "optimiser=disk", "params=host,params=disk"])
def test_tiers_that_mean_nothing_are_quoted(installed: None, text: str) -> None:
    with pytest.raises(PlanError, match=r"--offload .*: cannot read .*write each of params, grads"):
        offloading(text)


@pytest.mark.parametrize("text", ["params=moon", "fraction=much"])
def test_refusals_of_the_plugin_are_passed_on(installed: None, text: str) -> None:
    with pytest.raises(PlanError, match=f"--offload {text}: "):
        offloading(text)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="pip install polyshard-quantized"):
        quantizing("int8")
    with pytest.raises(PlanError, match="pip install polyshard-offload"):
        offloading("params=host")
