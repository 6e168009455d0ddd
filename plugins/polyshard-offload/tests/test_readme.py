"""Every guarantee of the README names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
README = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
NAMED = re.findall(r"\| `(test_\w+\.py)::(test_\w+)` \|", README)


@pytest.mark.parametrize(("file", "function"), NAMED, ids=[name for _, name in NAMED])
def test_guarantees_name_tests(file: str, function: str) -> None:
    (path,) = FOLDER.rglob(file)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_table_is_there() -> None:
    assert len(NAMED) > 20
