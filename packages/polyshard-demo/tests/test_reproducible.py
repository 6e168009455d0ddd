"""``--reproducible`` and ``--record``: what they refuse, with and without the plugin they need.

Runs with the plugin are in its own tests, ``test_demo.py`` and ``test_restarts.py``.
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
from polyshard_demo import plugins
from polyshard_demo.errors import DemoError
from polyshard_demo.launch import run_local_ranks
from polyshard_demo.settings import Settings
from polyshard_demo.text import Corpus, Windows
from polyshard_demo.worker import Worker, fix_kernels

OUT = Path("run")


class FakeError(SettingError):
    """What the plugin raises."""


def made(slots: int, seed: int) -> tuple[int, int]:
    if slots == 7:
        raise FakeError("no tree of 7")
    return slots, seed


def sampler(samples: int, batch_size: int, slots: int, *, seed: int) -> tuple[int, ...]:
    if samples < batch_size * slots:
        raise FakeError("not one step")
    return samples, batch_size, slots, seed


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the plugin."""
    package = SimpleNamespace(Reproducible=made, SlotSampler=sampler, ReproducibleError=FakeError)
    monkeypatch.setattr(plugins, "package_of", lambda name, option: package)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reproducible": -1}, "--reproducible must be at least 0"),
        ({"reproducible": 7}, "--reproducible 7: no tree of 7"),
        ({"reproducible": 4, "ranks": 8}, "8 data-parallel ranks do not divide 4 slots"),
        ({"reproducible": 4, "batch": 6}, r"--batch 6 does not divide over 4 slots; .* of 4"),
        ({"reproducible": 4, "engine": "torch"}, "--reproducible needs --engine polyshard"),
        ({"reproducible": 4, "quantize": "int8"}, "--reproducible with --quantize int8"),
        ({"reproducible": 8, "accumulate": 2}, r"--accumulate 2: .* each of 2 ranks runs 4"),
        ({"record": Path("records")}, "--record records needs --reproducible"),
    ],
)
def test_what_does_not_fit_is_refused(installed: None, given: Any, message: str) -> None:
    with pytest.raises(DemoError, match=message):
        Settings(out=OUT, **given)


def test_an_absent_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyshard_cli.plan.request.plugins.find_spec", lambda name: None)
    with pytest.raises(PlanError, match="pip install polyshard-reproducible"):
        Settings(out=OUT, reproducible=4)


def test_settings_reach_the_plugin(installed: None) -> None:
    Settings(out=OUT, reproducible=8, accumulate=4, record=Path("records"))
    assert Settings(out=OUT, reproducible=2, ranks=1, batch=2).accumulate == 1
    made: Any = plugins.reproducible_plugin(4, 5)
    assert made == (4, 5)
    windows = Windows(Corpus("a text", bytes(90)), 8)  # 81 bytes to train on
    assert plugins.slot_sampler(windows, 8, 4, 3) == (10, 2, 4, 3)
    with pytest.raises(DemoError, match="--text a text is too short: not one step"):
        plugins.slot_sampler(windows, 16, 4, 3)


def test_options_reach_the_settings(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr("polyshard_demo.command.launch", seen.append)
    arguments = ["train", "--reproducible", "8", "--record", "records"]
    assert CliRunner().invoke(cli.app(), arguments).exit_code == 0
    assert (seen[0].reproducible, seen[0].record) == (8, Path("records"))


@pytest.mark.parametrize("name", ["reproducible", "dropout"])
def test_a_resume_keeps_slots_and_dropout(installed: None, name: str) -> None:
    saved = Settings(out=OUT, reproducible=8, dropout=0.5)
    saved.check_continues(saved.to_plain(), OUT)
    older = {key: value for key, value in saved.to_plain().items() if key != name}
    for plain in (saved.to_plain() | {name: 0}, older):  # those written before there were any
        with pytest.raises(DemoError, match=f"--{name}: saved 0.*, now "):
            saved.check_continues(plain, OUT)
    other = Settings(out=OUT)
    other.check_continues({k: v for k, v in other.to_plain().items() if k != name}, OUT)


def test_means_do_not_see_how_ranks_share_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fp64 sums from left to right are all different."""
    shares = ([[1e16, 1.0, -1e16, 3.0]], [[1e16, 1.0], [-1e16, 3.0]], [[3.0, 1.0], [-1e16, 1e16]])
    for share in shares:
        monkeypatch.setattr(Worker, "gather", lambda self, value, every=share: every)
        assert Worker(0, len(share), torch.device("cpu")).exact_mean(share[0]) == 1.0


def threads_of(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    """``OMP_NUM_THREADS`` of ranks that are started for ``settings``."""
    seen: list[str] = []

    def start(config: object, work: object) -> Any:
        return lambda given: seen.append(os.environ["OMP_NUM_THREADS"])

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", start)
    run_local_ranks(lambda given: None, settings)
    return seen[0]


def test_every_number_of_ranks_has_the_same_threads(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert threads_of(Settings(out=OUT, ranks=2), monkeypatch) == "4"
    assert threads_of(Settings(out=OUT, ranks=2, reproducible=2), monkeypatch) == "1"
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    fix_kernels(torch.device("cpu"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    fix_kernels(torch.device("cpu"))
    assert threads_of(Settings(out=OUT, ranks=2, reproducible=2), monkeypatch) == "3"
    assert chosen == [1]


def test_accelerators_run_kernels_that_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    fix_kernels(torch.device("cuda"))
    assert (asked, os.environ["CUBLAS_WORKSPACE_CONFIG"]) == ([True], ":16:8")
