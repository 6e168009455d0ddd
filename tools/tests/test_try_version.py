"""Trials of versions: what they run, and what is kept of them. Nothing is installed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import try_version
from make_version_docs import cell, what_was_run
from subsets import PLUGINS, SUBSETS
from try_version import conformance_files, is_fine, parts, store, summary

ROOT = Path(__file__).parents[2]


def record(torch: str, python: str, **found: Any) -> dict[str, Any]:
    return {"torch": torch, "python": python, "date": "2026-01-01", "commit": "abc", **found}


def test_a_trial_uses_every_subset_and_every_plugin_has_tests_that_tell() -> None:
    brief = list(parts(argparse.Namespace(core=False, plugins=False)))
    held = [part.held for part in brief if part.heading == "smoke"]
    assert held == list(SUBSETS.values())
    alone = [conformance_files([name]) for name in PLUGINS]
    assert all(alone)
    assert conformance_files(PLUGINS) == [file for files in alone for file in files]
    assert all((ROOT / file).is_file() for file in conformance_files([]))


def test_a_later_trial_replaces_the_one_of_that_torch_and_python(tmp_path: Path) -> None:
    results = tmp_path / "versions.json"
    for torch, python in (("2.13.0+cpu", "3.12.1"), ("2.9.0", "3.11.7"), ("2.13.1", "3.12.4")):
        store(record(torch, python), results)
    kept = [(one["torch"], one["python"]) for one in json.loads(results.read_text())]
    assert kept == [("2.9.0", "3.11.7"), ("2.13.1", "3.12.4")]


def test_a_command_sees_nothing_of_the_checkout_and_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tools"))
    assert try_version.run("-c", "import subsets").startswith("failed: ModuleNotFoundError")
    monkeypatch.setattr(try_version, "COMMAND_SECONDS", 0.5)
    said = try_version.run("-uc", "import time; print('so far'); time.sleep(60)")
    assert said.startswith("cut off after 0.0 min: ")
    assert not is_fine(said)


def test_the_page_tells_failures_and_what_was_not_run() -> None:
    output = "...F\nFAILED plugins/a/tests/test_a.py::test_b[2] - no\n1 failed in 12.50s\n"
    assert summary(output) == "1 failed (test_a.py::test_b[2])"
    fine = record(
        "2.13.0+cpu",
        "3.11.7",
        smoke={"core": "fine", "offload": "failed: no | module"},
        conformance={"core": "12 passed, 1 skipped"},
        suites={"core": "not run: the trial was stopped"},
    )
    text = what_was_run(
        [fine, record("2.15.0", "3.12.1", install="failed: no matching distribution")]
    )
    assert "| ✘ 1 of 2 | ✔ 1 of 1, 12 tests | – 0 of 1 | not run |" in text
    assert "Python 3.11.7, smoke (offload): failed: no &#124; module\n" in text
    assert "Python 3.11.7, suites (core): not run: the trial was stopped\n" in text
    assert "| ✘ not installed |" in text
    assert "torch 2.13 with Python 3.12, 3.13" in text
    assert cell(None) == "not run"
