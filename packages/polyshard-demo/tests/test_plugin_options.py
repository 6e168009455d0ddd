"""Options of other plugins, what they refuse with and without these, and how kernels are chosen.

Runs with the plugin of ``--reproducible`` are in its own tests, ``test_demo.py`` and
``test_restarts.py``.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from polyshard.errors import SettingError
from polyshard_cli import main as cli
from polyshard_cli.plan.errors import PlanError
from polyshard_demo import engine, ranks
from polyshard_demo.errors import DemoError
from polyshard_demo.settings import Settings

OUT = Path("run")


class FakeError(SettingError):
    """What the plugin raises."""


def made(slots: int, seed: int) -> tuple[int, int]:
    if slots == 7:
        raise FakeError("no tree of 7")
    return slots, seed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reproducible": -1}, "--reproducible must be at least 0"),
        ({"reproducible": 4, "ranks": 8}, "8 data-parallel ranks do not divide 4 slots"),
        ({"reproducible": 4, "batch": 6}, r"--batch 6 does not divide over 4 slots"),
        ({"reproducible": 4, "engine": "torch"}, "--reproducible needs --engine polyshard"),
        ({"reproducible": 4, "quantize": "int8"}, "--reproducible with --quantize int8"),
        ({"reproducible": 8, "accumulate": 2}, r"--accumulate 2: .* each of 2 ranks runs 4"),
        ({"record": Path("records")}, "--record records needs --reproducible"),
        ({"ranks": 4, "tp": 3}, "--tp 3 does not divide --ranks 4"),
        ({"ranks": 4, "tp": 0}, "--tp must be at least 1"),
        ({"ranks": 4, "tp": 2, "engine": "torch"}, "--tp needs --engine polyshard"),
        ({"ranks": 4, "tp": 2, "batch": 3}, r"--batch 3 does not divide over 2 data-parallel"),
    ],
)
def test_what_does_not_fit_is_refused(given: Any, message: str) -> None:
    with pytest.raises(DemoError, match=message):
        Settings(out=OUT, **given)


@pytest.mark.parametrize(
    ("given", "name"),
    [({"reproducible": 4}, "reproducible"), ({"ranks": 4, "tp": 2}, "tensor-parallel")],
)
def test_an_absent_plugin_is_named(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], name: str
) -> None:
    monkeypatch.setattr("polyshard_cli.plan.request.plugins.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=f"pip install polyshard-{name}"):
        engine.plugins_of(Settings(out=OUT, **given))


def test_settings_reach_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(Reproducible=made)
    monkeypatch.setattr(engine, "reproducible", lambda: package)
    assert engine.plugins_of(Settings(out=OUT, reproducible=4, seed=5, accumulate=2)) == [(4, 5)]
    with pytest.raises(PlanError, match="--reproducible 7: no tree of 7"):
        engine.plugins_of(Settings(out=OUT, reproducible=7, ranks=1, batch=7))
    assert engine.plugins_of(Settings(out=OUT)) == []


def test_options_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr("polyshard_demo.command.launch", seen.append)
    arguments = ["train", "--reproducible", "8", "--record", "records"]
    assert CliRunner().invoke(cli.app(), arguments).exit_code == 0
    assert (seen[0].reproducible, seen[0].record) == (8, Path("records"))


def test_means_do_not_see_how_ranks_share_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fp64 sums from left to right are all different."""
    shares = ([[1e16, 1.0, -1e16, 3.0]], [[1e16, 1.0], [-1e16, 3.0]], [[3.0, 1.0], [-1e16, 1e16]])
    for share in shares:
        monkeypatch.setattr(ranks, "gather", lambda value, every=share: every)
        assert ranks.mean([]) == 1.0


def test_ranks_share_the_cores_or_have_the_same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for given in ({}, {"OMP_NUM_THREADS": "3"}):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        for reproducible in (False, True):
            ranks.fix_kernels(torch.device("cpu"), reproducible=reproducible)
    assert chosen == [4, 1, 3, 3]


def test_accelerators_run_kernels_that_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    ranks.fix_kernels(torch.device("cuda"), reproducible=False)
    ranks.fix_kernels(torch.device("cuda"), reproducible=True)
    assert (asked, os.environ["CUBLAS_WORKSPACE_CONFIG"]) == ([True], ":16:8")
