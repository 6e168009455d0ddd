"""The benchmark of silent errors: its verdicts, and the table that is committed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.silent.__main__ import RESULTS, classify
from benchmarks.silent.cases import CASES


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([(0, "", "", ""), (1, "", "", "said")], "right"),
        ([(0, "", "", ""), (1, "off", "", "")], "silently wrong"),
        ([(0, "off", "", "said"), (1, "off", "", "")], "reports"),
        ([(0, "off", "", ""), (1, "", "ValueError: x", "")], "refuses"),
        ([(0, "", "-", "")], "-"),
        ([(0, "", "", ""), (-1, "", "", "")], "hangs"),
    ],
)
def test_verdicts(answers: list[tuple[int, str, str, str]], verdict: str) -> None:
    assert classify(answers, 2)["verdict"] == verdict


def test_every_case_is_in_the_table() -> None:
    cells = json.loads(RESULTS.read_text())["cells"]
    assert all(list(cases) == list(CASES) for cases in cells.values())


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
