"""Tests that pages name as ``file.py::function``: whether they are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "packages/*/tests",
    "plugins/*/tests",
    "integration_tests",
    "examples/*/tests",
    "tools/tests",
)
NAME = re.compile(r"`((?:\w+/)*test_\w+\.py(?:::\w+)?)`")


def named_in(text: str) -> list[str]:
    """Every test that ``text`` names, in its order."""
    return NAME.findall(text)


def is_there(name: str) -> bool:
    """Whether some test file of that name has that function."""
    file, _, function = name.partition("::")
    found = [path for path in _test_files() if path.as_posix().endswith(f"/{file}")]
    return bool(found) and (not function or any(function in _functions(path) for path in found))


@cache
def _test_files() -> tuple[Path, ...]:
    """Of whichever room of whichever distribution."""
    folders = [folder for pattern in FOLDERS for folder in ROOT.glob(pattern)]
    return tuple(path for folder in folders for path in folder.rglob("test_*.py"))


@cache
def _functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
