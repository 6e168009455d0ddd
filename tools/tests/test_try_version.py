"""Trials of versions: which subsets, what is kept of them, and the page. Nothing is installed."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from make_version_docs import PAGE, PYTHONS, RESULTS, TORCHES, cell, page
from torch_features import FEATURES
from trial_environment import Budget, Environment, Outcome, interpreter, summary
from try_version import (
    conformance_files,
    failures,
    parts,
    plugin_names,
    sampled,
    store,
    subset_name,
    subsets,
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


def test_every_plugin_has_tests_that_tell_whether_it_works() -> None:
    names = plugin_names()
    assert len(names) >= 6
    for name in names:
        assert conformance_files([name]), name
    alone = [file for name in names for file in conformance_files([name])]
    assert conformance_files(names) == alone
    assert all((ROOT / file).is_file() for file in [*alone, *conformance_files([])])


def test_a_sample_has_every_subset_of_what_is_combined() -> None:
    names = plugin_names()
    composed = {"polyshard-offload", "polyshard-quantized", "polyshard-tensor-parallel"}
    found = [frozenset(subset) for subset in sampled(names)]
    assert len(set(found)) == len(found)
    assert {subset for subset in found if subset <= composed} == {
        frozenset(subset) for subset in subsets(sorted(composed))
    }
    assert {frozenset([name]) for name in names} <= set(found)
    assert frozenset(names) in found


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
    """Stands for an environment: remembers what it holds.

    With the plugin ``broken`` it is killed; ``refused`` cannot be installed; after ``steps`` parts
    its time is over.
    """

    def __init__(self, *, broken: str = "", refused: str = "", steps: int = 1000) -> None:
        self.held: list[str] = []
        self.broken, self.refused = broken, refused
        self.budget = self
        self.steps = steps

    def seconds(self) -> float:
        self.steps -= 1
        return max(0.0, self.steps + 1)

    def wheel(self, name: str) -> Path:
        return Path(f"{name}.whl")

    def about(self, torch: str) -> dict[str, Any]:
        return {"torch": torch, "python": "3.12.1", "features": {}}

    def hold(self, wanted: list[str], known: list[str]) -> Outcome:
        assert set(wanted) <= set(known)
        self.held = wanted
        return Outcome(is_fine=self.refused not in wanted, said="conflict")

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
    settings = {"torch": "2.13.0", "core": False, "plugins": False, "sample": False, **given}
    return argparse.Namespace(**settings)


def last_of(trial: Any, **given: Any) -> dict[str, Any]:
    *_, last = try_everything(trial, options(**given))
    return last


def test_a_trial_runs_every_subset_conformance_and_suites() -> None:
    names = plugin_names()
    each = {subset_name([name]) for name in names}
    last = last_of(Trial(), core=True)
    assert len(last["smoke"]) == 2 ** len(names)
    assert set(last["conformance"]) == {"core", *each, subset_name(names)}
    assert last["suites"] == {"core": "1 passed"}
    assert failures(last) == []
    sample = last_of(Trial(), sample=True)
    assert set(sample["smoke"]) == {subset_name(subset) for subset in sampled(names)}
    assert "suites" not in sample
    assert set(sample["conformance"]) == {"core", subset_name(names)}
    suites = last_of(Trial(), sample=True, core=True, plugins=True)
    assert set(suites["suites"]) == {"core", *each}  # conformance of each alone is among them
    assert set(suites["conformance"]) == {"core", subset_name(names)}


def test_a_trial_that_is_killed_has_a_reason_in_every_cell() -> None:
    trial: Any = Trial(broken="polyshard-offload")
    found: list[dict[str, Any]] = []
    steps = try_everything(trial, options(sample=True))
    with suppress(KeyboardInterrupt):
        for one in steps:
            found.append(one)
    cells = [(part.heading, part.name) for part in parts(options(sample=True))]
    assert [found[-1][heading][name] for heading, name in cells] == [
        "fine" if cell == ("smoke", "core") else "not run: the trial was stopped" for cell in cells
    ]
    assert len(failures(found[-1])) == len(cells) - 1
    text = page([found[-1] | {"date": "d", "commit": "c"}])
    assert "| – 1 of 12 | – 0 of 2 | not run | – 1 of 3 |" in text
    assert "conformance (core, all): not run: the trial was stopped\n" in text


def test_when_the_time_is_over_the_rest_says_so() -> None:
    last = last_of(Trial(steps=3), sample=True)
    said = list(last["smoke"].values())
    assert said[:3] == ["fine"] * 3
    assert set(said[3:]) == {"not run: the trial's time was over"}
    assert set(last["conformance"].values()) == {"not run: the trial's time was over"}


def test_plugins_that_cannot_be_installed_fail_alone() -> None:
    last = last_of(Trial(refused="polyshard-matrix"))
    refused = {name for name, said in last["smoke"].items() if said == "failed: conflict"}
    assert refused == {name for name in last["smoke"] if "matrix" in name}
    assert len(refused) == len(last["smoke"]) / 2
    assert last["conformance"]["matrix"] == "failed: conflict"
    assert last["conformance"]["offload"] == "1 passed"


def environment_of(script: str, folder: Path, **limits: float) -> Environment:
    """One whose interpreter is a script of a shell."""
    python = folder / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    (folder / "empty").mkdir()
    return Environment(folder, ROOT / "dist", Budget(**limits))


def has_ended(pid: int) -> bool:
    """Whether a process that was told to end is gone within seconds, or waits to be reaped."""
    state = Path("/proc", str(pid), "stat")
    for _ in range(100):
        with suppress(FileNotFoundError):
            if state.read_text().rpartition(")")[2].split()[0] not in "ZX":
                time.sleep(0.1)
                continue
        return True
    return False


@pytest.mark.parametrize(
    ("trap", "said"),
    [
        ("trap 'echo \"3 passed in 1.50s\"; exit 2' INT", "3 passed"),  # as pytest does
        ("trap '' INT", "nothing was said"),
    ],
)
def test_what_does_not_end_in_time_is_ended_with_its_children(
    trap: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trial_environment.GRACE_SECONDS", 1.0)
    script = f"{trap}\nsleep 300 &\necho $! > {tmp_path}/child\nwait\nwait"
    env = environment_of(script, tmp_path, command=2.0)
    outcome = env.smoke([])
    assert not outcome
    assert str(outcome) == f"cut off after 2 s: {said}"
    assert has_ended(int((tmp_path / "child").read_text()))


def test_a_command_leaves_no_process_behind(tmp_path: Path) -> None:
    env = environment_of(f"sleep 300 &\necho $! > {tmp_path}/child\necho fine", tmp_path)
    assert str(env.smoke([])) == "fine"
    assert has_ended(int((tmp_path / "child").read_text()))


def test_time_is_that_of_a_command_or_what_is_left() -> None:
    assert Budget(command=5.0).seconds() == 5.0
    assert 0 < Budget.of(minutes=1).seconds() <= 60
    assert Budget.of(minutes=-1).seconds() == 0


def test_what_failed_is_named() -> None:
    bad, good = (
        str(Outcome(is_fine=False, said="1 failed")),
        str(Outcome(is_fine=True, said="fine")),
    )
    found = record("2.13.0", "3.11", smoke={"core": good, "offload": bad}, suites={"core": bad})
    assert failures(found) == [
        "smoke offload: failed: 1 failed",
        "suites core: failed: 1 failed",
    ]
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
    assert "| ✘ 1 of 2 | ✔ 1 of 1, 12 tests | not run | not run |" in text
    assert "Python 3.11.7, smoke (offload): failed: no &#124; module\n" in text
    assert "| ✘ not installed |" in text
    assert "Python 3.12.1, install: failed: no matching distribution\n" in text
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


@pytest.mark.parametrize("name", ["README.md", "docs/reference/support.md"])
def test_documents_name_versions_that_were_tried(name: str) -> None:
    said = re.search(r"Tested with torch .*?\.\s", (ROOT / name).read_text("utf-8"), re.S)
    assert said is not None
    tried = {
        ".".join(one["torch"].split(".")[:2])
        for one in json.loads(RESULTS.read_text("utf-8"))
        if not any(text.startswith(Outcome.FAILED) for text in one["conformance"].values())
        and any("passed" in text for text in one["conformance"].values())
    }
    assert {"2.13", "2.15"} <= set(re.findall(r"2\.\d+", said[0])) <= tried
