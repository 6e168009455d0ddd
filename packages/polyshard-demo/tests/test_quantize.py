"""``--quantize``: what it refuses, with and without the plugin it needs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyshard_demo import quantize
from polyshard_demo.errors import DemoError
from polyshard_demo.settings import Settings


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the plugin, whose classes remember what they were made with."""

    def called(name: str) -> Any:
        return lambda **keywords: (name, keywords)

    names = ("Int8Block", "Float8Block", "Int4Block", "ErrorFeedback", "QuantizedComm")
    package = SimpleNamespace(**{name: called(name) for name in names})
    monkeypatch.setattr(quantize, "find_spec", lambda name: object())
    monkeypatch.setattr(quantize, "import_module", lambda name: package)


@pytest.mark.parametrize("text", ["int9", "int8,int8,int8", "", "int8 int8"])
def test_unknown_formats_are_refused(installed: None, text: str) -> None:
    with pytest.raises(DemoError, match="one of int8, e4m3, int4, native"):
        quantize.check_quantize(text)


def test_nothing_to_quantize_is_refused(installed: None) -> None:
    with pytest.raises(DemoError, match="leave the option out"):
        quantize.check_quantize("native,native")


def test_an_absent_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match="pip install polyshard-quantized"):
        Settings(out=Path("run"), quantize="int8")


def test_only_polyshard_quantizes(installed: None) -> None:
    with pytest.raises(DemoError, match="--engine polyshard"):
        Settings(out=Path("run"), quantize="int8", engine="torch")


def test_formats_reach_the_plugin(installed: None) -> None:
    int8: Any = ("Int8Block", {})
    int4: Any = ("Int4Block", {})
    feedback: Any = ("ErrorFeedback", {})
    made = [quantize.quantizing_plugin(text)[1] for text in ("int8", "native, int4")]
    assert made[0] == {"weights": int8, "gradients": int8, "error_feedback": None}
    assert made[1] == {"weights": None, "gradients": int4, "error_feedback": feedback}
