"""``--tp``: what it refuses, how ranks and batches are shared, and a run with the plugin."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyshard_cli.plan.errors import PlanError
from polyshard_demo import plugins
from polyshard_demo.errors import DemoError
from polyshard_demo.settings import Settings


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the plugin."""
    package = SimpleNamespace(
        demo_plan=lambda: "the plan",
        TensorParallel=lambda plan, mesh: (plan, mesh),
    )
    monkeypatch.setattr(plugins, "package_of", lambda name, option: package)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"ranks": 4, "tp": 3}, "--tp 3 does not divide --ranks 4"),
        ({"ranks": 4, "tp": 0}, "--tp must be at least 1"),
        ({"ranks": 4, "tp": 2, "engine": "torch"}, "--tp needs --engine polyshard"),
        ({"ranks": 4, "tp": 2, "batch": 3}, r"--batch 3 does not divide over 2 data-parallel"),
    ],
)
def test_what_does_not_fit_is_refused(installed: None, given: Any, pattern: str) -> None:
    with pytest.raises(DemoError, match=pattern):
        Settings(out=Path("run"), **given)


def test_an_absent_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyshard_cli.plan.request.plugins.find_spec", lambda name: None)
    with pytest.raises(PlanError, match="pip install polyshard-tensor-parallel"):
        Settings(out=Path("run"), ranks=4, tp=2)


def test_the_plan_reaches_the_plugin(installed: None) -> None:
    assert Settings(out=Path("run"), ranks=4, tp=2, batch=2).data_ranks == 2
    assert plugins.tensor_parallel_plugin("mesh") == ("the plan", "mesh")
