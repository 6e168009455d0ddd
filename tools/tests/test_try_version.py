"""Trials of versions: what they run, what is kept of them, and the page. Nothing is installed."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

import try_version
from make_version_docs import PAGE, PYTHONS, TORCHES, cell, page
from subsets import PLUGINS, SUBSETS
from torch_features import FEATURES
from try_version import RESULTS, conformance_files, is_fine, not_fine, parts, store, summary

ROOT = Path(__file__).parents[2]


def record(torch: str, python: str, **found: Any) -> dict[str, Any]:
    return {"torch": torch, "python": python, "date": "2026-01-01", "commit": "abc", **found}


def test_a_trial_uses_every_subset_and_runs_suites_where_asked() -> None:
    names = [f"polyshard-{name}" for name in ("offload", "quantized", "tensor-parallel")]
    brief = list(parts(argparse.Namespace(core=False, plugins=False)))
    held = [set(part.held) for part in brief if part.heading == "smoke"]
    assert len(held) == len(SUBSETS)
    assert all(subset in held for subset in ([set(), {names[0]}, set(names[1:]), set(PLUGINS)]))
    whole = parts(argparse.Namespace(core=True, plugins=True))
    assert [part.held for part in whole if part.heading == "suites"] == [
        [],
        *([n] for n in PLUGINS),
    ]


def test_every_plugin_has_tests_that_tell_whether_it_works() -> None:
    alone = [conformance_files([name]) for name in PLUGINS]
    assert all(alone)
    assert conformance_files(PLUGINS) == [file for files in alone for file in files]
    assert all((ROOT / file).is_file() for file in conformance_files([]))


def test_a_later_trial_replaces_the_one_of_that_torch_and_python(tmp_path: Path) -> None:
    results = tmp_path / "versions.json"
    for torch, python in (
        ("2.13.0+cpu", "3.12.1"),
        ("2.9.0", "3.11.7"),
        ("2.13.0", "3.11.7"),
        ("2.13.1", "3.12.4"),
    ):
        store(record(torch, python), results)
    kept = [(one["torch"], one["python"]) for one in json.loads(results.read_text())]
    assert kept == [("2.9.0", "3.11.7"), ("2.13.0", "3.11.7"), ("2.13.1", "3.12.4")]


def test_a_command_sees_nothing_of_the_checkout_and_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tools"))
    said = try_version.run("-c", "import subsets")
    assert said.startswith("failed: ModuleNotFoundError")
    assert not is_fine(said)
    monkeypatch.setattr(try_version, "COMMAND_SECONDS", 0.5)
    said = try_version.run("-uc", "import time; print('so far'); time.sleep(60)")
    assert said.startswith("cut off after 0.0 min: ")
    assert not is_fine(said)


def test_what_failed_is_named() -> None:
    found = record("2.13.0", "3.11", smoke={"core": "fine", "offload": "failed: 1 failed"})
    assert list(not_fine(found)) == [("smoke", "offload", "failed: 1 failed")]


def test_a_summary_has_counts_and_names_and_no_seconds() -> None:
    output = (
        "...F\nFAILED plugins/a/tests/test_a.py::test_b[2 ranks] - AssertionError: no\n"
        "1 failed, 3 passed, 2 skipped in 12.50s (0:00:12)\n\n"
    )
    assert summary(output) == "1 failed, 3 passed, 2 skipped (test_a.py::test_b[2 ranks])"
    assert summary("") == ""


def test_the_page_tells_failures_and_what_was_not_run() -> None:
    features = {feature.name: False for feature in FEATURES}
    fine = record(
        "2.13.0+cpu",
        "3.11.7",
        smoke={"core": "fine", "offload": "failed: no | module"},
        conformance={"core": "12 passed, 1 skipped"},
        suites={"core": "not run: the trial was stopped"},
        features=features,
    )
    text = page([fine, record("2.15.0", "3.12.1", install="failed: no matching distribution")])
    assert "| ✘ 1 of 2 | ✔ 1 of 1, 12 tests | – 0 of 1 | not run |" in text
    assert "Python 3.11.7, smoke (offload): failed: no &#124; module\n" in text
    assert "Python 3.11.7, suites (core): not run: the trial was stopped\n" in text
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
        if any("passed" in text for text in one["conformance"].values())
        and not any(text.startswith("failed") for text in one["conformance"].values())
    }
    assert {"2.13", "2.15"} <= set(re.findall(r"2\.\d+", said[0])) <= tried
