"""Trials of versions: which subsets, what is kept of them, and the page. Nothing is installed."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from make_version_docs import PAGE, PYTHONS, RESULTS, TORCHES, cell, page
from torch_features import FEATURES
from trial_environment import Environment, Outcome, interpreter, summary
from try_version import (
    conformance_files,
    failures,
    plugin_names,
    store,
    subset_name,
    subsets,
    telling,
    try_everything,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("count", [0, 1, 3, 6])
def test_every_subset_is_tried_once(count: int) -> None:
    names = [f"p{number}" for number in range(count)]
    found = [frozenset(subset) for subset in subsets(names)]
    assert len(set(found)) == len(found) == 2**count
    # One plugin comes or goes, so that one command of pip is enough.
    assert all(len(one ^ other) == 1 for one, other in pairwise(found))
    assert found[0] == frozenset()
    assert {frozenset(subset) for subset in telling(names)} <= set(found)


def test_every_plugin_has_tests_that_tell_whether_it_works() -> None:
    names = plugin_names()
    assert len(names) >= 6
    for name in names:
        assert conformance_files([name]), name
    alone = [file for name in names for file in conformance_files([name])]
    assert conformance_files(names) == alone
    assert all((ROOT / file).is_file() for file in [*alone, *conformance_files([])])


def record(torch: str, python: str, **found: Any) -> dict[str, Any]:
    return {"torch": torch, "python": python, "date": "2026-01-01", "commit": "abc", **found}


def test_a_later_trial_replaces_the_one_of_that_torch_and_python(tmp_path: Path) -> None:
    results = tmp_path / "versions.json"
    for one in (
        record("2.13.0+cpu", "3.12.1"),
        record("2.9.0", "3.11.7"),
        record("2.13.0", "3.11.7"),
        record("2.13.1", "3.12.4"),
    ):
        store(one, results)
    kept = [(one["torch"], one["python"]) for one in json.loads(results.read_text())]
    assert kept == [("2.9.0", "3.11.7"), ("2.13.0", "3.11.7"), ("2.13.1", "3.12.4")]


class Trial:
    """Stands for an environment: remembers what it holds, and loses ``broken`` to an error."""

    def __init__(self, broken: str = "") -> None:
        self.held: list[str] = []
        self.broken = broken

    def wheel(self, name: str) -> Path:
        return Path(f"{name}.whl")

    def about(self, torch: str) -> dict[str, Any]:
        return {"torch": torch, "python": "3.12.1", "features": {}}

    def hold(self, wanted: list[str], known: list[str]) -> None:
        assert set(wanted) <= set(known)
        self.held = wanted

    def pip(self, *arguments: str) -> Outcome:
        return Outcome(is_fine=True, said=arguments[0])

    def smoke(self, names: list[str]) -> Outcome:
        assert names == ["polyshard", *self.held]
        if self.broken in self.held:
            raise KeyboardInterrupt
        return Outcome(is_fine=True, said="fine")

    def pytest(self, *files: str) -> Outcome:
        return Outcome(is_fine=True, said=f"{len(files)} passed")

    def mypy(self, script: Path) -> Outcome:
        return Outcome(is_fine=script.is_file(), said=script.name)


def options(**given: Any) -> Any:
    settings = {"torch": "2.13.0", "core": False, "sample": False, **given}
    return argparse.Namespace(**settings)


def test_a_trial_runs_every_subset_and_the_telling_tests() -> None:
    names = plugin_names()
    trial: Any = Trial()
    *_, last = try_everything(trial, options(core=True))
    assert len(last["smoke"]) == 2 ** len(names)
    assert set(last["conformance"]) == {subset_name(subset) for subset in telling(names)}
    assert last["core"] == "1 passed"
    assert trial.held == []  # the whole suite of core runs with nothing beside it
    assert "stopped" not in last
    assert failures(last) == []
    (sampled,) = list(try_everything(trial, options(sample=True)))[-1:]
    assert set(sampled["smoke"]) == set(last["conformance"])


def test_a_trial_that_is_stopped_says_so_and_leaves_what_it_found() -> None:
    trial: Any = Trial(broken="polyshard-offload")
    found: list[dict[str, Any]] = []
    steps = try_everything(trial, options(sample=True))
    with suppress(KeyboardInterrupt):
        for one in steps:
            found.append(one)
    assert list(found[-1]["smoke"]) == ["core", "calibration", "matrix"]
    assert failures(found[-1]) == ["stopped: failed: before all was run"]
    assert "✘ before all was run" in page([found[-1] | {"date": "d", "commit": "c"}])


def test_what_failed_is_named() -> None:
    bad, good = (
        str(Outcome(is_fine=False, said="1 failed")),
        str(Outcome(is_fine=True, said="fine")),
    )
    found = record("2.13.0", "3.11", smoke={"core": good, "offload": bad}, core=bad)
    assert failures(found) == ["smoke offload: failed: 1 failed", "core: failed: 1 failed"]
    assert failures(record("2.13.0", "3.11", smoke={"core": good}, features={"x": False})) == []


def test_a_summary_has_counts_and_names_and_no_seconds() -> None:
    output = (
        "...F\nFAILED plugins/a/tests/test_a.py::test_b[2 ranks] - AssertionError: no\n"
        "1 failed, 3 passed, 2 skipped in 12.50s (0:00:12)\n\n"
    )
    assert summary(output) == "1 failed, 3 passed, 2 skipped (test_a.py::test_b[2 ranks])"
    assert summary("smoke: fine\n") == "smoke: fine"
    assert summary("") == ""


def test_interpreters_are_those_of_the_version_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for place, version in (("bin/python4.1", "4.0"), ("versions/4.1.2/bin/python", "4.1")):
        path = tmp_path / place
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
    assert interpreter("4.1") == tmp_path / "versions" / "4.1.2" / "bin" / "python"
    assert interpreter("4.0") is None


def test_an_environment_sees_nothing_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever PYTHONPATH says here, and wherever the tool was started."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "packages" / "polyshard" / "src"))
    python = interpreter(".".join(map(str, sys.version_info[:2])))
    assert python is not None
    subprocess.run([python, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (tmp_path / "empty").mkdir()
    env = Environment(tmp_path, ROOT / "dist")
    outcome = env.smoke(["polyshard"])
    assert not outcome
    assert "ModuleNotFoundError: No module named" in outcome.said


def test_the_page_tells_failures_and_what_was_not_run() -> None:
    features = {feature.name: False for feature in FEATURES}
    fine = record(
        "2.13.0+cpu",
        "3.11.7",
        smoke={"core": "fine", "offload": "failed: no | module"},
        conformance={"core": "12 passed, 1 skipped"},
        features=features,
    )
    text = page([fine, record("2.15.0", "3.12.1", install="failed: no matching distribution")])
    assert "| ✘ 1 of 2; not offload |" in text
    assert "✔ 1 of 1, 12 tests" in text
    assert "✘ no matching distribution" in text
    assert "torch 2.13 with Python 3.12, 3.13" in text
    row = next(line for line in text.splitlines() if line.startswith(f"| {FEATURES[0].name} "))
    assert row.split(" | ")[1:6] == ["(–)", "(–)", "–", "(–)", "(✔)"]  # 2.15 was not asked
    assert cell(None) == "not run"


def test_the_ends_are_those_that_the_warning_names() -> None:
    source = (ROOT / "packages/polyshard/src/polyshard/_torch/versions.py").read_text("utf-8")
    (ends,) = re.findall(r"^OLDEST, NEWEST = \((\d+), (\d+)\), \((\d+), (\d+)\)$", source, re.M)
    assert TORCHES[0].split(".") == list(ends[:2])
    assert TORCHES[-1].split(".") == list(ends[2:])
    noxfile = (ROOT / "noxfile.py").read_text("utf-8")
    (torches,) = re.findall(r"^TORCHES = \((.*)\)$", noxfile, re.M)
    assert tuple(re.findall(r'"(\d+\.\d+)\.', torches)) == TORCHES
    (pythons,) = re.findall(r"^PYTHONS = \((.*)\)$", noxfile, re.M)
    assert tuple(re.findall(r'"([\d.]+)"', pythons)) == PYTHONS


def test_the_page_is_made_from_what_was_found() -> None:
    assert PAGE.read_text("utf-8") == page(json.loads(RESULTS.read_text("utf-8")))
