"""Every row of the support table names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "support.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| | |")
]


def files_called(name: str) -> list[Path]:
    """Test files of that name, in whichever room of whichever distribution."""
    return [
        path
        for tests in (
            "packages/*/tests",
            "plugins/*/tests",
            "integration_tests",
            "examples/*/tests",
        )
        for folder in ROOT.glob(tests)
        for path in folder.rglob(name)
    ]


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_rows_say_yes_or_which_error_and_name_a_test(row: list[str]) -> None:
    _, answer, test = row
    assert answer.startswith("✔") or re.search(r"(✘|no effect).*`\w+(Error|Warning)`", answer)
    file, _, function = test.strip("`").partition("::")
    found = [p for p in files_called(file.rpartition("/")[2]) if p.as_posix().endswith(file)]
    assert found
    assert not function or any(function in functions_in(path) for path in found)


def test_the_table_is_there() -> None:
    assert len(ROWS) > 40
