"""``--quantize``: what it refuses, with and without the plugin it needs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyshard_demo import plugins
from polyshard_demo.errors import DemoError
from polyshard_demo.settings import Settings


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the plugin, whose classes remember what they were made with."""

    def called(name: str) -> Any:
        return lambda **keywords: (name, keywords)

    formats = {
        "plain": SimpleNamespace(needs_feedback=False),
        "coarse": SimpleNamespace(needs_feedback=True),
    }
    package = SimpleNamespace(
        ErrorFeedback=called("ErrorFeedback"),
        QuantizedComm=called("QuantizedComm"),
        format_names=lambda: tuple(formats),
        format_named=formats.__getitem__,
    )
    monkeypatch.setattr(plugins, "find_spec", lambda name: object())
    monkeypatch.setattr(plugins, "import_module", lambda name: package)


@pytest.mark.parametrize("text", ["int9", "plain,plain,plain", "", "plain plain"])
def test_unknown_formats_are_refused(installed: None, text: str) -> None:
    with pytest.raises(DemoError, match="one of plain, coarse, native"):
        plugins.check_quantize(text)


def test_nothing_to_quantize_is_refused(installed: None) -> None:
    with pytest.raises(DemoError, match="leave the option out"):
        plugins.check_quantize("native,native")


def test_an_absent_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match="pip install polyshard-quantized"):
        Settings(out=Path("run"), quantize="int8")


def test_only_polyshard_quantizes(installed: None) -> None:
    with pytest.raises(DemoError, match="--engine polyshard"):
        Settings(out=Path("run"), quantize="plain", engine="torch")


def test_formats_reach_the_plugin(installed: None) -> None:
    plain, coarse = SimpleNamespace(needs_feedback=False), SimpleNamespace(needs_feedback=True)
    feedback: Any = ("ErrorFeedback", {})
    made = [plugins.quantizing_plugin(text)[1] for text in ("plain", "native, coarse")]
    assert made[0] == {"weights": plain, "gradients": plain, "error_feedback": None}
    assert made[1] == {"weights": None, "gradients": coarse, "error_feedback": feedback}
