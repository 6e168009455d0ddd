"""Every guarantee of the README names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TITLE = "## Guarantees"
SECTION = (FOLDER.parent / "README.md").read_text(encoding="utf-8").partition(TITLE)[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SECTION.partition("\n## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| what")
]


def names_in(name: str) -> set[str]:
    tree = ast.parse((FOLDER / name).read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_guarantees_name_tests_that_exist(row: list[str]) -> None:
    _, named = row
    for reference in named.split(", "):
        file, separator, function = reference.strip("`").partition("::")
        assert separator
        assert function in names_in(f"{file}.py")


def test_the_table_is_there() -> None:
    assert len(ROWS) > 30
