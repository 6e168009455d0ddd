"""Names of torch that a build for the CPU lacks are those of its stubs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch


def members(stub: str, name: str) -> set[str]:
    """What a class of a stub has, with its bases and nested classes."""
    classes = {node.name: node for node in ast.parse(stub).body if isinstance(node, ast.ClassDef)}
    node, found = classes[name], set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            found.add(part.name)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= members(stub, base.id)
    return found


def test_nccl() -> None:
    path = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"
    if not path.exists():
        pytest.skip("this torch brings no stubs of its process groups")
    needed = {"abort", "options", "split_from", "_set_sequence_number_for_group"}
    assert needed <= members(path.read_text("utf-8"), "ProcessGroupNCCL")
