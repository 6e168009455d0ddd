"""Which modules become units: the blocks that a model repeats, or those a user names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from torch import nn

from polyshard_cli.plan.errors import PlanError, nearest

Units = dict[str, tuple[nn.Module, ...]]
"""The modules of each unit, by the name of its first."""

NONE = "none"
"""The pattern of a model without units but itself."""


def units_of(model: nn.Module, patterns: Sequence[str] = ()) -> Units:
    """Modules to shard before the model itself, inner ones before those around them.

    Args:
        model: whose modules they are.
        patterns: of names, in which a star stands for one part (``blocks.*``, not what is inside
            those) or a piece of one. ``blocks.*/2`` makes one unit of every two that follow each
            other; :data:`NONE` makes none. Without patterns: the members of every outermost
            ``nn.ModuleList`` that have parameters.

    Raises:
        PlanError: for a pattern that no module matches, with the nearest name, and for runs that
            are no number.
    """
    if not patterns:
        return {name: (module,) for name, module in repeated(model).items()}
    if tuple(patterns) == (NONE,):
        return {}
    named = {name: module for name, module in model.named_modules() if name}
    found: Units = {}
    taken: set[str] = set()
    for text in patterns:
        pattern, run = _run(text)
        matched = [name for name in named if _matches(name, pattern) and name not in taken]
        if not matched and not any(_matches(name, pattern) for name in named):
            raise PlanError(
                f"--units {text}: no module has such a name; the nearest is "
                f"{nearest(pattern, named, 0) or 'the model itself'}"
            )
        taken.update(matched)
        for names in _runs(matched, run):
            found[names[0]] = tuple(named[name] for name in names)
    nests = any(inner.startswith(f"{outer}.") for outer in found for inner in found)
    lie = sorted(found, key=list(named).index, reverse=nests)
    return {name: found[name] for name in lie}


def repeated(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Members with parameters of every outermost ``nn.ModuleList``, by name."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            members = {f"{path}.{n}": m for n, m in child.named_children()}
            found |= {n: m for n, m in members.items() if any(True for _ in m.parameters())}
        else:
            found |= repeated(child, f"{path}.")
    return found


def _run(text: str) -> tuple[str, int]:
    """``blocks.*/2`` as its pattern and how many make a unit."""
    pattern, slash, run = text.partition("/")
    if not slash:
        return pattern, 1
    if not run.isdecimal() or int(run) < 1:
        raise PlanError(
            f"--units {text}: after a slash stands how many modules make a unit, as {pattern}/2"
        )
    return pattern, int(run)


def _runs(names: Sequence[str], run: int) -> Iterator[list[str]]:
    """So many at a time, of one parent."""
    for _, found in groupby(names, lambda name: name.rpartition(".")[0]):
        members = list(found)
        yield from (members[i : i + run] for i in range(0, len(members), run))


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
