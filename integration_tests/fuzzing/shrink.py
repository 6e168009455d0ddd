"""Smaller cases that fail in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from fuzzing.case import Case, Leaf, Mesh, Tree

SIMPLER: dict[str, tuple[Any, ...]] = {
    "width": (1, 2, 3),
    "size": (1, 2, 3),
    "forwards": (1,),
    "shards": (1, 2),
    "tensor": (0,),
    "replicas": (0,),
    "norm_type": (2.0,),
}
"""Values to try for a field beside its default."""


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float) -> Case:
    """The smallest case found that still ``fails``, within ``seconds``."""
    deadline = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for smaller in candidates(case):
            if time.monotonic() > deadline:
                return case
            if smaller != case and fails(smaller):
                case, found = smaller, True
                break
    return case


def candidates(case: Case) -> Iterator[Case]:
    """Simpler cases, the boldest first."""
    for script in _shorter(case.script):
        yield replace(case, script=script)
    if case.quantized is not None:
        yield replace(case, quantized=None)
    if case.offload is not None:
        yield replace(case, offload=None)
    for tree in _smaller_trees(case.tree):
        if isinstance(tree, Tree):
            yield replace(case, tree=tree)
    for value in _simpler(case):
        if value.tree.unit is not None:
            yield value


def _shorter(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    size = len(items) // 2
    while size:
        for start in range(0, len(items), size):
            yield items[:start] + items[start + size :]
        size //= 2
    if len(items) == 1:
        yield ()


def _smaller_trees(node: Leaf | Tree) -> Iterator[Leaf | Tree]:
    """With children left out, or put instead of their parent."""
    if isinstance(node, Leaf):
        return
    for number, child in enumerate(node.children):
        before, after = node.children[:number], node.children[number + 1 :]
        if before or after:
            yield replace(node, children=before + after)
        if isinstance(child, Tree):
            yield replace(node, children=before + child.children + after)
        for smaller in _smaller_trees(child):
            yield replace(node, children=(*before, smaller, *after))


def _simpler(value: Any) -> Iterator[Any]:
    """With one field, at any depth, at its default or a simpler value."""
    for field in fields(value):
        current = getattr(value, field.name)
        others: Iterator[Any] = iter(())
        if field.name not in ("tree", "script", "children"):
            others = _instead(field.name, current, field.default)
        for other in (*others, *_within(current)):
            yield replace(value, **{field.name: other})


def _instead(name: str, current: Any, default: Any) -> Iterator[Any]:
    """Values for a field that count as simpler than ``current``, the simplest first."""
    for other in (default, *SIMPLER.get(name, ())):
        if current == other:
            return
        if not (isinstance(current, Mesh) and other.ranks > current.ranks):
            yield other


def _within(current: Any) -> Iterator[Any]:
    """``current`` with something in it left out or simplified."""
    if is_dataclass(current):
        yield from _simpler(current)
    for number, item in enumerate(current if isinstance(current, tuple) else ()):
        before, after = current[:number], current[number + 1 :]
        if is_dataclass(item):
            yield from ((*before, simpler, *after) for simpler in _simpler(item))
        elif len(current) > 1:
            yield (*before, *after)
