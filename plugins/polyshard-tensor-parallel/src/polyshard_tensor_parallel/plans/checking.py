"""A plan against a model: everything wrong with it, found before anything is moved.

Only names, shapes and attributes are looked at. They are the same on every rank, so every rank
raises the same error before the first collective.
"""

from __future__ import annotations

import difflib
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
from polyshard_tensor_parallel.plans.attention import left_out
from polyshard_tensor_parallel.plans.matching import matches, suggestion
from polyshard_tensor_parallel.plans.plan import Heads, Plan

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
    problems = [] if plan.styles else [_empty(modules)]
    patterns = (*plan.styles, *(heads.modules for heads in plan.heads), *plan.whole)
    problems += [_unknown(p, modules) for p in patterns if not matches(p, modules)]
    assignments = [
        Assignment(name, modules[name], pattern, style)
        for pattern, style in plan.styles.items()
        for name in matches(pattern, modules)
    ]
    problems += _already_distributed(model)
    problems += _twice(assignments)
    for assignment in assignments:
        problems += _check_module(assignment, world_size)
    problems += _ties(model, assignments)
    counts: list[HeadCount] = []
    for heads in plan.heads:
        for name in matches(heads.modules, modules):
            problems += _check_heads(heads, name, modules[name], world_size)
            counts += _head_counts(heads, name, modules[name], world_size, problems)
    problems += left_out(plan, modules, {one.name: one.style for one in assignments}, world_size)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise SettingError(
            f"the tensor-parallel plan does not fit {type(model).__name__} on {world_size} ranks; "
            f"nothing was changed:{listed}"
        )
    # A module of two names that one pattern means is divided once.
    once = {(id(one.module), id(one.style)): one for one in reversed(assignments)}
    return Checked(tuple(reversed(once.values())), tuple(counts))


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


def _empty(modules: Mapping[str, nn.Module]) -> str:
    linear = next((name for name, m in modules.items() if isinstance(m, nn.Linear)), None)
    example = f", such as {{'{linear}': ColwiseParallel()}}" if linear else ""
    return (
        f"the plan has no styles, so nothing would be divided; give modules styles{example}, or "
        "leave the plugin out."
    )


def _already_distributed(model: nn.Module) -> Iterator[str]:
    found = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
    if found:
        yield (
            f"'{found[0]}'{f' and {len(found) - 1} more' if len(found) > 1 else ''} is a DTensor "
            "already. Apply a plan once, before fully_shard; for a model that was parallelized "
            "elsewhere, pass TensorParallel(mesh=...) without a plan."
        )


def _twice(assignments: list[Assignment]) -> Iterator[str]:
    first: dict[int, Assignment] = {}
    for one in assignments:
        if not isinstance(one.style, DISTRIBUTING):
            continue
        other = first.setdefault(id(one.module), one)
        if other.pattern != one.pattern or other.style is not one.style:
            yield (
                f"'{one.name}' gets {type(other.style).__name__} from '{other.pattern}' and "
                f"{type(one.style).__name__} from '{one.pattern}'; narrow one of the patterns."
            )


def _check_module(one: Assignment, world_size: int) -> Iterator[str]:
    style, module = one.style, one.module
    inner = next((name for name, _ in module.named_parameters() if "." in name), None)
    if inner is not None and isinstance(style, DISTRIBUTING):
        yield (
            f"'{one.name}' has parameters in modules of its own ('{inner}'), which "
            f"{type(style).__name__} does not reach; name those modules, or use a style of your "
            "own."
        )
        return
    if isinstance(style, SequenceParallel) and isinstance(module, nn.Linear | nn.Embedding):
        yield (
            f"'{one.name}' is a {type(module).__name__}; SequenceParallel is for norms and "
            "dropout, which every rank holds whole. Divide it with ColwiseParallel or "
            "RowwiseParallel."
        )
        return
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    kind = type(style).__name__
    if not isinstance(module, nn.Linear | nn.Embedding):
        yield (
            f"'{one.name}' is a {type(module).__name__}; {kind} takes nn.Linear and nn.Embedding. "
            "Name its linear children, or use a style of your own."
        )
        return
    if not loses_remainder(style, module):
        return
    for name, parameter in module.named_parameters(recurse=False):
        placement = placement_of(style, module, name)
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % world_size:
            rows = parameter.shape[placement.dim]
            yield (
                f"'{one.name}.{name}' {tuple(parameter.shape)} has {rows} "
                f"on dim {placement.dim}, which {kind} divides over {world_size} ranks with a "
                f"remainder, and {_PLAIN[type(style)]} plain local tensors, whose sizes hide the "
                f"remainder. {_WHOLE[type(style)]}, pad it, leave the module out, "
                "or use another number of ranks."
            )


_PLAIN = {ColwiseParallel: "hands on", RowwiseParallel: "is handed"}
_WHOLE = {
    ColwiseParallel: "Pass output_layouts=Replicate() or use_local_output=False",
    RowwiseParallel: "Pass input_layouts=Replicate()",
}


def loses_remainder(style: ColwiseParallel | RowwiseParallel, module: nn.Module) -> bool:
    """Whether what ``style`` cuts unevenly is passed on in local tensors that do not say so.

    Weights may be uneven: a ``DTensor`` knows its whole size. A style that makes one of a plain
    part of activations takes all parts for as large as this rank's.
    """
    if isinstance(style, ColwiseParallel):
        return style.use_local_output and any(isinstance(p, Shard) for p in style.output_layouts)
    if isinstance(module, nn.Embedding):
        return False  # every rank looks up what it has of the rows
    return any(isinstance(p, Shard) for p in style.input_layouts)


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
            f"'{name}' ({type(module).__name__}) has no whole number '{heads.width}' for the width "
            "of a head; name the attribute with Heads(width=...)."
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


def _head_counts(
    heads: Heads, name: str, module: nn.Module, world_size: int, problems: list[str]
) -> Iterator[HeadCount]:
    """Attributes to divide; what is wrong with the others goes to ``problems``."""
    for attribute in heads.counts:
        count = getattr(module, attribute, None)
        if not isinstance(count, int) or count % world_size:
            known = [n for n, v in vars(module).items() if isinstance(v, int) and v > 1]
            close = difflib.get_close_matches(attribute, known, n=1)
            meant = f" Did you mean '{close[0]}'?" if count is None and close else ""
            problems.append(
                f"'{name}.{attribute}' is {count!r}, which does not divide over {world_size} "
                f"ranks; Heads(counts=...) names attributes that count heads.{meant}"
            )
            continue
        yield HeadCount(module, name, attribute, count, count // world_size)
