"""Which modules become units: the blocks that a model repeats, or those a user names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from polyshard_plan.errors import PlanError

__all__ = ["units_of"]


def units_of(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Modules to shard before the model itself, by name, inner ones before those around them.

    Without patterns: the members of every outermost ``nn.ModuleList`` that have parameters.

    Raises:
        PlanError: for a pattern that no module matches, with the nearest name.
    """
    if not patterns:
        return dict(_repeated(model))
    named = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            close = difflib.get_close_matches(pattern, named, n=1, cutoff=0) or ["the model itself"]
            raise PlanError(
                f"--units {pattern}: no module has such a name; the nearest is {close[0]}"
            )
    chosen = {n: m for n, m in named.items() if any(fnmatchcase(n, p) for p in patterns)}
    return dict(reversed(chosen.items())) if _nests(chosen) else chosen


def _nests(chosen: dict[str, nn.Module]) -> bool:
    return any(a != b and b.startswith(f"{a}.") for a in chosen for b in chosen)


def _repeated(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            members = [(f"{path}.{n}", m) for n, m in child.named_children()]
            found += [(n, m) for n, m in members if any(True for _ in m.parameters())]
        else:
            found += _repeated(child, f"{path}.")
    return found
