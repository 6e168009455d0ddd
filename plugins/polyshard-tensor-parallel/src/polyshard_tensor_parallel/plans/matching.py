"""Patterns of a plan against the modules of a model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn


def matches(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Names of ``modules`` that ``pattern`` means, in the order the model lists them."""
    if not pattern:
        return [""] if "" in modules else []
    parts = pattern.split(".")
    return [name for name in modules if name and _fits(parts, name.split("."))]


def _fits(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_fits(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _fits(pattern[1:], name[1:])


def suggestion(pattern: str, modules: Mapping[str, nn.Module]) -> str | None:
    """The pattern that was meant: one spelt alike, or the same further down the model."""
    if matches(f"**.{pattern}", modules):
        return f"**.{pattern}"
    known: dict[tuple[str, ...], None] = {(): None}
    for part in pattern.split("."):
        known = dict.fromkeys(_extended(known, part, modules))
    ranked = [".".join(found) for found in known]
    close = difflib.get_close_matches(pattern, ranked, n=1, cutoff=0.6)
    if close:
        return close[0]
    whole = difflib.get_close_matches(pattern, [n for n in modules if n], n=1, cutoff=0.6)
    return whole[0] if whole else _without_beginning(pattern, modules)


def _without_beginning(pattern: str, modules: Mapping[str, nn.Module]) -> str | None:
    """``pattern`` without first parts that belong to a module around the model."""
    parts = pattern.split(".")
    tails = (".".join(parts[start:]) for start in range(1, len(parts)) if parts[start] != "*")
    return next((tail for tail in tails if matches(tail, modules)), None)


def _extended(
    known: Mapping[tuple[str, ...], None], part: str, modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, ...]]:
    """Every beginning in ``known`` with one more part: as written if it fits, else a close one."""
    for beginning in known:
        children = _children(beginning, modules)
        if part == "**" or any(fnmatchcase(child, part) for child in children):
            yield (*beginning, part)
        else:
            for close in difflib.get_close_matches(part, children, n=2, cutoff=0.4):
                yield (*beginning, close)


def _children(beginning: tuple[str, ...], modules: Mapping[str, nn.Module]) -> list[str]:
    found: dict[str, None] = {}
    for name in modules:
        parts = name.split(".") if name else []
        for depth in range(len(parts)):
            if _fits(beginning, parts[:depth]):
                found[parts[depth]] = None
    return list(found)
