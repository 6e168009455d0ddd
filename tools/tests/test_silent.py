"""The benchmark of silent errors: its verdicts, and the table that is committed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.silent import __main__ as main
from benchmarks.silent.__main__ import PAGE, load, page, run
from benchmarks.silent.cases import CASES
from benchmarks.silent.engines import ENGINES, ENVIRONMENTS
from benchmarks.silent.run import classify


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([(0, "", "", []), (1, "", "", ["said"])], "right"),
        ([(0, "", "", []), (1, "off", "", [])], "silently wrong"),
        ([(0, "off", "", ["said"]), (1, "off", "", [])], "reports"),
        ([(0, "off", "", ["OMP_NUM_THREADS"]), (1, "off", "", [])], "silently wrong"),
        ([(0, "off", "", []), (1, "", "ValueError: x", [])], "refuses"),
        ([(0, "off", "", []), (1, "", "RuntimeError: Connection closed", [])], "silently wrong"),
        ([(0, "off", "", [])], "silently wrong"),
        ([(0, "", "-", [])], "-"),
        ([(0, "", "", [])], "hangs"),
    ],
)
def test_verdicts(answers: list[tuple[int, str, str, list[str]]], verdict: str) -> None:
    assert classify(answers, 2)["verdict"] == verdict


def test_every_case_is_in_the_table() -> None:
    results = load()
    assert list(results) == [engine.name for engine in ENGINES]
    assert all(list(found.get("cells", CASES)) == list(CASES) for found in results.values())


def test_polyshard_is_never_silently_wrong() -> None:
    cells = load()["polyshard"]["cells"]
    assert {cell["verdict"] for cell in cells.values()} <= {"right", "refuses", "reports"}
    assert len(cells) >= 36


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == page(load())


@pytest.mark.thorough
def test_what_cannot_be_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "libraries", ("./no-such-folder",))
    monkeypatch.setattr(main, "ROOT", tmp_path)
    accelerate = next(engine for engine in ENGINES if engine.name == "accelerate")
    run(accelerate, tmp_path / "results.json", [])
    assert "pip" in json.loads((tmp_path / "results.json").read_text())["not_run"]


@pytest.mark.thorough
def test_cells_are_run_in_ranks_of_their_own(tmp_path: Path) -> None:
    chosen = ["--case=optimizer_before", "--engine=FSDP2", f"--results={tmp_path}"]
    subprocess.run([sys.executable, "-m", "benchmarks.silent", *chosen], check=True)
    assert load(tmp_path)["FSDP2"]["cells"]["optimizer_before"]["verdict"] == "silently wrong"


@pytest.mark.thorough
def test_cells_that_were_run_are_kept(tmp_path: Path) -> None:
    ddp = next(engine for engine in ENGINES if engine.name == "DDP")
    kept = {case: {"verdict": "hangs", "output": case} for case in CASES if case != "other_state"}
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"cells": kept}))
    run(ddp, file, [])
    cells = json.loads(file.read_text())["cells"]
    assert cells.pop("other_state")["verdict"] == "refuses"
    assert cells == kept
