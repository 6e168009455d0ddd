"""Every row of the support table names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[2] / "docs" / "reference" / "support.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| | |")
]


def functions_in(name: str) -> set[str]:
    tree = ast.parse((FOLDER / name).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_rows_say_yes_or_which_error_and_name_a_test(row: list[str]) -> None:
    _, answer, test = row
    assert answer.startswith("✔") or re.search(r"(✘|no effect).*`\w+(Error|Warning)`", answer)
    file, _, function = test.strip("`").partition("::")
    assert (FOLDER / file).exists()
    assert not function or function in functions_in(file)


def test_the_table_is_there() -> None:
    assert len(ROWS) > 40
