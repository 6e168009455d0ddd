"""Every row of the support table names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from named_tests import is_there, named_in

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "support.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| | |")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_rows_say_yes_or_which_error_and_name_a_test(row: list[str]) -> None:
    _, answer, tests = row
    assert answer.startswith("✔") or re.search(r"(✘|no effect).*`\w+(Error|Warning)`", answer)
    assert tests == ", ".join(f"`{test}`" for test in named_in(tests))
    assert [test for test in named_in(tests) if not is_there(test)] == []


def test_the_table_is_there() -> None:
    assert len(ROWS) > 40
