"""The benchmark of silent errors: its verdicts, and the table that is committed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.silent.__main__ import PAGE, RESULTS, classify, page
from benchmarks.silent.cases import CASES
from benchmarks.silent.engines import ENGINES


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([(0, "", "", []), (1, "", "", ["said"])], "right"),
        ([(0, "", "", []), (1, "off", "", [])], "silently wrong"),
        ([(0, "off", "", ["said"]), (1, "off", "", [])], "reports"),
        ([(0, "off", "", ["OMP_NUM_THREADS"]), (1, "off", "", [])], "silently wrong"),
        ([(0, "off", "", []), (1, "", "ValueError: x", [])], "refuses"),
        ([(0, "", "-", [])], "-"),
        ([(0, "", "", []), (-1, "", "", [])], "hangs"),
    ],
)
def test_verdicts(answers: list[tuple[int, str, str, list[str]]], verdict: str) -> None:
    assert classify(answers, 2)["verdict"] == verdict


def test_every_case_is_in_the_table() -> None:
    engines = json.loads(RESULTS.read_text())["engines"]
    assert list(engines) == [engine.name for engine in ENGINES]
    assert all(list(found.get("cells", CASES)) == list(CASES) for found in engines.values())


def test_polyshard_is_never_silently_wrong() -> None:
    cells = json.loads(RESULTS.read_text())["engines"]["polyshard"]["cells"]
    assert {cell["verdict"] for cell in cells.values()} <= {"right", "refuses", "reports"}
    assert len(cells) >= 30


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))


def test_an_engine_may_have_a_python_of_its_own() -> None:
    command = [sys.executable, "-m", "benchmarks.silent", "--case=parameter_twice"]
    found = subprocess.run(
        [*command, "--engine=DDP", f"--python=DDP={sys.executable}"],
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = found.stdout.splitlines()
    assert line.startswith("DDP ")
    assert "refuses" in line


def test_cells_are_run_in_ranks_of_their_own() -> None:
    command = [sys.executable, "-m", "benchmarks.silent", "--case", "optimizer_before"]
    found = subprocess.run(
        [*command, "--engine", "polyshard", "--engine", "FSDP2"],
        capture_output=True,
        text=True,
        check=True,
    )
    ours, theirs = found.stdout.splitlines()
    assert "refuses" in ours
    assert "silently wrong" in theirs
