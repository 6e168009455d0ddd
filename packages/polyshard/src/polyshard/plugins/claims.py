"""Who does what for a group: answers are checked, exclusive roles resolved, constraints kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from polyshard.errors import ConflictError, PluginError
from polyshard.plugins.answers import Binding
from polyshard.plugins.hooks import Hooks
from polyshard.plugins.manager import Answer, Member
from polyshard.plugins.roles import (
    ADAPTERS,
    CONSTRAINTS,
    OBSERVERS,
    ROLES,
    Contributions,
    GroupHook,
    Role,
)
from polyshard.plugins.validation import misfit
from polyshard.seams import GroupInfo
from polyshard.sharding.layout import GroupLayout, ParameterLayout

T = TypeVar("T")


def contributions_of(
    hooks: Hooks, engine: Member, group: GroupInfo, plugin_lines: tuple[str, ...]
) -> Contributions:
    """Ask for ``group``: everything claimed, then checked, then frozen.

    Args:
        hooks: of the stack.
        engine: what answers for a role that no plugin claims.
        group: what the plugins are asked about.
        plugin_lines: one line a plugin, kept in the result.

    Raises:
        ConflictError: listing every role that two plugins claim.
        PluginError: listing every answer that is not what its hook asks for.
    """
    rows: list[GroupHook[Any]] = [*ROLES, CONSTRAINTS, OBSERVERS, ADAPTERS]
    answers = {row.hook: hooks.of_group(row, group) for row in rows}
    problems = [text for row in rows for text in _misfits(row, answers[row.hook])]
    if problems:
        raise PluginError("\n".join(problems))
    conflicts = [text for role in ROLES for text in _conflicts(role, answers[role.hook], group)]
    if conflicts:
        raise ConflictError("\n".join(conflicts))
    for role in ROLES:
        answers[role.hook] = answers[role.hook] or [Answer(engine, role.engine())]
    return Contributions(
        taken={role: answers[role.hook][0].value for role in ROLES},
        constraints=_values(answers[CONSTRAINTS.hook]),
        observers=_values(answers[OBSERVERS.hook]),
        adapters=_values(answers[ADAPTERS.hook]),
        plugin_lines=plugin_lines,
        labels=tuple((a.value, a.member.label) for found in answers.values() for a in found),
    )


def _misfits(row: GroupHook[Any], answers: Sequence[Answer[Any]]) -> Iterator[str]:
    """Answers that would fail only later, far from the plugin that gave them."""
    for answer in answers:
        if problem := misfit(answer.value, row.seam):
            yield f"plugin {answer.member.label}: {row.hook} returned {problem}"


def _conflicts(role: Role[Any], claims: Sequence[Answer[Any]], group: GroupInfo) -> Iterator[str]:
    if len(claims) < 2:
        return
    plugins = " and ".join(claim.member.label for claim in claims)
    parameters = [p.fqn for p in group.parameters]
    shown = ", ".join(parameters[:4]) + (", ..." if len(parameters) > 4 else "")
    yield (
        f"plugins {plugins} both claim the {role.name} of group '{group.name}' ({shown}). Pass "
        "only one of them for this unit, or narrow one so that it returns None here."
    )


def _values(answers: Sequence[Answer[T]]) -> tuple[T, ...]:
    return tuple(answer.value for answer in answers)


def contiguous_run(placed: ParameterLayout) -> int:
    """Elements between two places where ranks part, in the memory of the full parameter."""
    if placed.dim is None:
        return placed.numel
    return math.prod(placed.chunk_shape[placed.dim :])


def check_constraints(binding: Binding, group: GroupInfo, layout: GroupLayout) -> None:
    """Refuse a layout that would separate elements a plugin needs together.

    Raises:
        PluginError: listing every parameter and plugin concerned.
    """
    problems = []
    for constraint in binding.contributions.constraints:
        for info, placed in zip(group.parameters, layout.parameters, strict=True):
            block = binding.block_elements(constraint, info)
            run = contiguous_run(placed)
            if layout.world_size > 1 and block > 1 and run % block and placed.dim is not None:
                problems.append(
                    f"plugin '{constraint.name}' needs blocks of {block} elements of '{info.fqn}' "
                    f"{info.shape} on one rank, but {layout.world_size} ranks part it every {run} "
                    "elements. Choose another block, shard another dim, or leave the parameter out."
                )
    if problems:
        raise PluginError("\n".join(problems))
