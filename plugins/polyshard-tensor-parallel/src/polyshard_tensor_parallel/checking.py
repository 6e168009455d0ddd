"""A plan against a model: everything wrong with it, found before anything is moved.

Only names, shapes and attributes are looked at. They are the same on every rank, so every rank
raises the same error before the first collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from polyshard.errors import SettingError
from polyshard_tensor_parallel.matching import matches, suggestion
from polyshard_tensor_parallel.plan import Heads, Plan

DISTRIBUTING = (ColwiseParallel, RowwiseParallel, SequenceParallel)
"""Styles whose placements of parameters are known; others are applied as they are."""


@dataclass(frozen=True)
class Assignment:
    """One style for one module, by the pattern that meant it."""

    name: str
    module: nn.Module
    pattern: str
    style: ParallelStyle


@dataclass(frozen=True)
class HeadCount:
    """An attribute that counts heads, before and after they are divided."""

    module: nn.Module
    name: str
    attribute: str
    before: int
    after: int


@dataclass(frozen=True)
class Checked:
    """A plan resolved for one model: in the order styles are applied."""

    assignments: tuple[Assignment, ...]
    counts: tuple[HeadCount, ...]


def check(plan: Plan, model: nn.Module, world_size: int) -> Checked:
    """Resolve ``plan`` for ``model`` over ``world_size`` tensor-parallel ranks.

    Raises:
        SettingError: listing everything that is wrong.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    problems: list[str] = []
    assignments: list[Assignment] = []
    for pattern, style in plan.styles.items():
        names = matches(pattern, modules)
        if not names:
            problems.append(_unknown(pattern, modules))
        assignments += [Assignment(name, modules[name], pattern, style) for name in names]
    problems += _already_distributed(model)
    problems += _twice(assignments)
    for assignment in assignments:
        problems += _check_module(assignment, world_size)
    problems += _ties(model, assignments)
    counts: list[HeadCount] = []
    for heads in plan.heads:
        names = matches(heads.modules, modules)
        if not names:
            problems.append(_unknown(heads.modules, modules))
        for name in names:
            problems += _check_heads(heads, name, modules[name], world_size)
            counts += _head_counts(heads, name, modules[name], world_size)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise SettingError(
            f"the tensor-parallel plan does not fit {type(model).__name__} on {world_size} ranks; "
            f"nothing was changed:{listed}"
        )
    return Checked(tuple(assignments), tuple(counts))


def placement_of(style: ParallelStyle, module: nn.Module, name: str) -> Placement | None:
    """Where ``style`` puts the parameter ``name`` of ``module``; ``None`` if that is not known."""
    if isinstance(style, SequenceParallel):
        return Replicate()
    embedding = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        return Shard(1) if embedding else Shard(0)
    if isinstance(style, RowwiseParallel):
        if embedding:
            return Shard(0)
        return Replicate() if name == "bias" else Shard(1)
    return None


def _unknown(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    meant = suggestion(pattern, modules)
    if meant is not None:
        return f"no module is called '{pattern}'. Did you mean '{meant}'?"
    children = ", ".join(sorted({name.partition(".")[0] for name in modules if name}))
    return f"no module is called '{pattern}'; names begin with one of: {children or '(none)'}."


def _already_distributed(model: nn.Module) -> Iterator[str]:
    found = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
    if found:
        yield (
            f"'{found[0]}'{f' and {len(found) - 1} more' if len(found) > 1 else ''} is a DTensor "
            "already. Apply a plan once, before fully_shard; for a model that was parallelized "
            "elsewhere, pass TensorParallel(mesh=...) without a plan."
        )


def _twice(assignments: list[Assignment]) -> Iterator[str]:
    first: dict[str, Assignment] = {}
    for one in assignments:
        if not isinstance(one.style, DISTRIBUTING):
            continue
        other = first.setdefault(one.name, one)
        if other is not one:
            yield (
                f"'{one.name}' gets {type(other.style).__name__} from '{other.pattern}' and "
                f"{type(one.style).__name__} from '{one.pattern}'; narrow one of the patterns."
            )


def _check_module(one: Assignment, world_size: int) -> Iterator[str]:
    style, module = one.style, one.module
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    kind = type(style).__name__
    if not isinstance(module, nn.Linear | nn.Embedding):
        yield (
            f"'{one.name}' is a {type(module).__name__}; {kind} takes nn.Linear and nn.Embedding. "
            "Name its linear children, or use a style of your own."
        )
        return
    for name, parameter in module.named_parameters(recurse=False):
        placement = placement_of(style, module, name)
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % world_size:
            rows = parameter.shape[placement.dim]
            yield (
                f"'{one.name}.{name}' {tuple(parameter.shape)} has {rows} "
                f"on dim {placement.dim}, which {kind} divides over {world_size} ranks with a "
                "remainder; pad it, leave the module out, or use another number of ranks."
            )


def _ties(model: nn.Module, assignments: list[Assignment]) -> Iterator[str]:
    for owners in tied(model):
        placed: dict[str, Placement | None] = {}
        for module_name, module, name in owners:
            styles = [a.style for a in assignments if a.module is module]
            known = [placement_of(s, module, name) for s in styles]
            placed[f"{module_name}.{name}"] = next((p for p in known if p is not None), None)
        if len(set(map(str, placed.values()))) > 1:
            shown = ", ".join(f"'{n}' {p or 'not in the plan'}" for n, p in placed.items())
            yield (
                f"tied parameters would be placed differently: {shown}. Give both a style that "
                "puts them alike: RowwiseParallel for an embedding and ColwiseParallel for a "
                "linear head are both Shard(0)."
            )


def tied(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Owners (module name, module, parameter name) of each parameter that has several."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module_name, module, name))
    return [found for found in owners.values() if len(found) > 1]


def _check_heads(heads: Heads, name: str, module: nn.Module, world_size: int) -> Iterator[str]:
    width = getattr(module, heads.width, None) if heads.projections else 1
    if not isinstance(width, int):
        yield (
            f"'{name}' ({type(module).__name__}) has no whole number '{heads.width}' that says how "
            "wide a head is; name the attribute with Heads(width=...)."
        )
        return
    for child in heads.projections:
        projection = getattr(module, child, None)
        if not isinstance(projection, nn.Linear):
            yield f"'{name}' has no linear child '{child}', which Heads(projections=...) names."
        elif projection.out_features % (width * world_size):
            count = projection.out_features / width
            yield (
                f"'{name}.{child}' makes {count:g} heads of {width}, which do not divide over "
                f"{world_size} ranks; use a number of ranks that divides them."
            )


def _head_counts(heads: Heads, name: str, module: nn.Module, world_size: int) -> list[HeadCount]:
    found = []
    for attribute in heads.counts:
        count = getattr(module, attribute, None)
        if not isinstance(count, int) or count % world_size:
            raise SettingError(
                f"'{name}.{attribute}' is {count!r}, which does not divide over {world_size} "
                "ranks; Heads(counts=...) names attributes that count heads. Nothing was changed."
            )
        found.append(HeadCount(module, name, attribute, count, count // world_size))
    return found
