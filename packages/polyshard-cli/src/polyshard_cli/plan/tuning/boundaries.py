"""Where units may begin and end: patterns of modules that a model has."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from polyshard_cli.plan.dry_run.units import NONE, repeated

RUNS = (2, 4)
"""Blocks that may be one unit together."""


def boundaries_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Patterns for ``--units`` by a word for them, the plainest first.

    Blocks alone (no patterns), with tables (what holds matrices outside of blocks) as units of
    their own, several to a unit, cut into their parts, and no units at all.
    """
    blocks = repeated(model)
    tables = tuple(_tables(model, blocks))
    if not blocks:
        return {"none": (NONE,)} | ({"tables": tables} if tables else {})
    lists = dict.fromkeys(name.rpartition(".")[0] for name in blocks)
    stars = tuple(f"{name}.*" for name in lists)
    parts = tuple(_parts(blocks))
    shortest = min(sum(n.rpartition(".")[0] == name for n in blocks) for name in lists)
    found: dict[str, tuple[str, ...]] = {"blocks": ()}
    if tables:
        found["blocks, tables"] = (*stars, *tables)
    for run in RUNS:
        if shortest >= 2 * run:
            found[f"{run} blocks"] = tuple(f"{star}/{run}" for star in stars)
    if len(parts) > 1:
        found["parts"] = parts
        found["parts, tables"] = (*parts, *tables)
    return found | {"none": (NONE,)}


def _tables(model: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[str]:
    """Modules with matrices of their own outside of blocks, such as an embedding."""
    for name, module in model.named_modules():
        is_inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if name and not is_inside and _has_matrices(module, recurse=False):
            yield name


def _parts(blocks: dict[str, nn.Module]) -> Iterator[str]:
    """Children of blocks that hold matrices, one pattern for all blocks of a list."""
    seen: set[str] = set()
    for name, block in blocks.items():
        for child, module in block.named_children():
            pattern = f"{name.rpartition('.')[0]}.*.{child}"
            if pattern not in seen and _has_matrices(module, recurse=True):
                seen.add(pattern)
                yield pattern


def _has_matrices(module: nn.Module, *, recurse: bool) -> bool:
    return any(p.ndim > 1 for p in module.parameters(recurse=recurse))
