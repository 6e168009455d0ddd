"""Who does what for a group: answers are checked, exclusive roles resolved, constraints kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from polyshard.plugins.answers import Binding
from polyshard.plugins.hooks import Hooks
from polyshard.plugins.manager import Answer, Member
from polyshard.plugins.roles import (
    ADAPTERS,
    CONSTRAINTS,
    OBSERVERS,
    ROLES,
    STATES,
    Contributions,
    GroupHook,
    PluginLines,
    Role,
)
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins.validation import misfit
from polyshard.plugins.seams import Around, GroupInfo
from polyshard.sharding.layout import GroupLayout, ParameterLayout

T = TypeVar("T")


def contributions_of(
    hooks: Hooks, engine: Member, group: GroupInfo, lines: PluginLines
) -> Contributions:
    """Ask for ``group``: everything claimed, then checked, then frozen.

    Args:
        hooks: of the stack.
        engine: what answers for a role that no plugin claims.
        group: what the plugins are asked about.
        lines: one a plugin, kept in the result.

    Raises:
        ConflictError: listing every role that two plugins claim.
        PluginError: listing every answer that is not what its hook asks for.
    """
    # State last: by then a plugin has made what it is kept in.
    rows: list[GroupHook[Any]] = [*ROLES, CONSTRAINTS, OBSERVERS, ADAPTERS, STATES]
    answers = {row.hook: hooks.of_group(row, group) for row in rows}
    wrappers = {role: [a for a in answers[role.hook] if _is_around(a)] for role in ROLES}
    for role in ROLES:
        answers[role.hook] = [a for a in answers[role.hook] if not _is_around(a)]
    problems = [text for row in rows for text in _misfits(row, answers[row.hook])]
    if problems:
        raise PluginError("\n".join(problems))
    conflicts = [text for role in ROLES for text in _conflicts(role, answers[role.hook], group)]
    if conflicts:
        raise ConflictError("\n".join(conflicts))
    for role in ROLES:
        inner = answers[role.hook] or [Answer(engine, role.engine())]
        answers[role.hook] = _nested(role, wrappers[role], inner[0], group)
    return Contributions(
        layers={role: _values(answers[role.hook]) for role in ROLES},
        constraints=_values(answers[CONSTRAINTS.hook]),
        observers=_values(answers[OBSERVERS.hook]),
        adapters=_values(answers[ADAPTERS.hook]),
        states=tuple((a.member.contract.name, a.value) for a in answers[STATES.hook]),
        lines=lines,
        labels=tuple((a.value, a.member.label) for found in answers.values() for a in found),
    )


def _misfits(row: GroupHook[Any], answers: Sequence[Answer[Any]]) -> Iterator[str]:
    """Answers that would fail only later, far from the plugin that gave them."""
    for answer in answers:
        if problem := misfit(answer.value, row.seam):
            yield f"plugin {answer.member.label}: {row.hook} returned {problem}"


def _is_around(answer: Answer[Any]) -> bool:
    return isinstance(answer.value, Around)


def _nested(
    role: Role[Any], wrappers: Sequence[Answer[Any]], inner: Answer[Any], group: GroupInfo
) -> list[Answer[Any]]:
    """What takes ``role``: the wrappers that do not stay out, in plugin order, then ``inner``.

    Raises:
        PluginError: for a wrapper that gives something else than a part; and what it raises.
    """
    layers = [inner]
    for wrapper in reversed(wrappers):
        within, label = layers[0], wrapper.member.label
        where = f"going around {_called(within)} as {role.name} of group '{group.name}'"
        try:
            made = wrapper.value.make(within.value)
        except Exception as error:
            error.add_note(f"raised by plugin {label} in {role.hook}, {where}")
            raise
        if made is within.value:
            continue
        if problem := misfit(made, role.seam):
            raise PluginError(f"plugin {label}: {role.hook}, {where}, returned {problem}")
        layers.insert(0, Answer(wrapper.member, made))
    return layers


def _called(answer: Answer[Any]) -> str:
    return f"'{answer.value.name}' of plugin {answer.member.label}"


def _conflicts(role: Role[Any], claims: Sequence[Answer[Any]], group: GroupInfo) -> Iterator[str]:
    if len(claims) < 2:
        return
    plugins = " and ".join(claim.member.label for claim in claims)
    parameters = [p.fqn for p in group.parameters]
    shown = ", ".join(parameters[:4]) + (", ..." if len(parameters) > 4 else "")
    yield (
        f"plugins {plugins} both claim the {role.name} of group '{group.name}' ({shown}). Pass "
        "only one of them for this unit, or narrow one so that it returns None here. (One that "
        "returns polyshard.Around(...) claims nothing: it goes around the other.)"
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
                plugin = binding.contributions.plugin_of(constraint)
                problems.append(
                    f"{plugin}: constraint '{constraint.name}' needs blocks of {block} elements of "
                    f"'{info.fqn}' {info.shape} of group '{group.name}' on one rank, but "
                    f"{layout.world_size} ranks part it every {run} elements. Choose another "
                    "block, shard another dim, or leave the parameter out."
                )
    if problems:
        raise PluginError("\n".join(problems))
