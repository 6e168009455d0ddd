"""Stacks of plugins from options, and what to install where one is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from polyshard import Plugin
from polyshard_cli.compare import CompareError
from polyshard_cli.compare.engines.plugins import Stack, make_stack
from polyshard_cli.compare.engines.spec import parse

QUANTIZED = pytest.mark.skipif(
    find_spec("polyshard_quantized") is None, reason="needs polyshard-quantized"
)
OFFLOAD = pytest.mark.skipif(find_spec("polyshard_offload") is None, reason="needs offload")


class Silent(Plugin):
    name = "silent"
    version = "1"


READY = Silent()


def made(name: str) -> Stack:
    (spec,) = parse([name], 4)
    return make_stack(spec)


def refused(name: str) -> str:
    with pytest.raises(CompareError) as caught:
        made(name)
    return str(caught.value)


def test_plugins_are_objects_or_what_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compare_plugins", sys.modules[__name__])
    assert made("polyshard+compare_plugins:READY").plugins == (READY,)
    (plugin,) = made("polyshard+compare_plugins:Silent").plugins
    assert isinstance(plugin, Silent)
    assert made("polyshard").plugins == ()
    assert len(made("polyshard+flat").wraps) == 1


@QUANTIZED
def test_formats_are_of_both_directions_or_one() -> None:
    (both,) = made("polyshard+int8").plugins
    assert both.weights.name == both.gradients.name == "int8"
    (one,) = made("polyshard+weights=int8").plugins
    assert (one.weights.name, one.gradients) == ("int8", None)
    (fed,) = made("polyshard+weights=int8+gradients=int4").plugins
    assert fed.gradients.needs_feedback
    assert fed.error_feedback is not None
    assert "did you mean int8?" in refused("polyshard+weights=itn8")
    assert "is both +weights=int8 and +gradients=int8" in refused("polyshard+int8+weights=int4")


@OFFLOAD
def test_tiers_of_offload() -> None:
    stack = made("polyshard+offload-optimizer+offload-fraction=0.5+flat")
    (offload,) = stack.plugins
    assert (offload.optimizer, offload.params, offload.fraction) == ("host", "device", 0.5)
    assert len(stack.wraps) == 2
    assert "is no number; try 0.5" in refused("polyshard+offload-fraction=half")
    assert refused("polyshard+offload-optimizer=tape").startswith("engine 'polyshard+offload-")


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("polyshard+int8", "polyshard-quantized"),
        ("polyshard+gradients=int8", "polyshard-quantized"),
        ("polyshard+offload-params", "polyshard-offload"),
    ],
)
def test_what_is_not_installed_is_named(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent: Callable[[str], None] = lambda _: None  # noqa: E731
    for room in ("compare.engines", "plan.request"):
        monkeypatch.setattr(f"polyshard_cli.{room}.plugins.find_spec", absent)
    assert refused(name).endswith(f"which is not installed: pip install {package}")


def test_names_that_nobody_has() -> None:
    assert "no installed plugin is named 'nobody'" in refused("polyshard+nobody")
    assert "importing nowhere failed" in refused("polyshard+nowhere:it")
