"""Who does what for a group: answers are checked, exclusive roles resolved, constraints kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from polyshard.errors import ConflictError, PluginError
from polyshard.plugins.answers import Binding
from polyshard.plugins.hooks import Hooks
from polyshard.plugins.manager import Answer
from polyshard.plugins.validation import misfit
from polyshard.seams import (
    CollectivesBackend,
    Contributions,
    GatherCodec,
    GroupInfo,
    Observer,
    ReduceCodec,
    ShardingConstraint,
    StateDictAdapter,
    StorageFactory,
)
from polyshard.sharding.layout import GroupLayout, ParameterLayout

T = TypeVar("T")


def contributions_of(
    hooks: Hooks, engine: str, group: GroupInfo, plugin_lines: tuple[str, ...]
) -> Contributions:
    """Ask for ``group``: everything claimed, then checked, then frozen.

    Args:
        hooks: of the stack.
        engine: name of the plugin whose answers to exclusive hooks yield to any other.
        group: what the plugins are asked about.
        plugin_lines: one line a plugin, kept in the result.

    Raises:
        ConflictError: listing every role that two plugins claim.
        PluginError: listing every answer that is not what its hook asks for.
    """
    storages = hooks.shard_storages(group)
    backends = hooks.collectives_backends(group)
    gather_codecs = hooks.gather_codecs(group)
    reduce_codecs = hooks.reduce_codecs(group)
    constraints = hooks.sharding_constraints(group)
    observers = hooks.observers(group)
    adapters = hooks.state_dict_adapters(group)
    problems = [
        *_misfits("polyshard_shard_storage", StorageFactory, storages),
        *_misfits("polyshard_collectives_backend", CollectivesBackend, backends),
        *_misfits("polyshard_gather_codec", GatherCodec, gather_codecs),
        *_misfits("polyshard_reduce_codec", ReduceCodec, reduce_codecs),
        *_misfits("polyshard_sharding_constraint", ShardingConstraint, constraints),
        *_misfits("polyshard_observer", Observer, observers),
        *_misfits("polyshard_state_dict_adapter", StateDictAdapter, adapters),
    ]
    if problems:
        raise PluginError("\n".join(problems))
    conflicts = [
        *_conflicts("the shard storage", storages, engine, group),
        *_conflicts("the collectives", backends, engine, group),
        *_conflicts("the gather codec", gather_codecs, engine, group),
        *_conflicts("the reduce codec", reduce_codecs, engine, group),
    ]
    if conflicts:
        raise ConflictError("\n".join(conflicts))
    exclusive: list[Answer[Any]] = [
        found[0] for found in (gather_codecs, reduce_codecs, storages, backends)
    ]
    answers = [*exclusive, *constraints, *observers, *adapters]
    # Order puts the engine last: the first answer is a plugin's claim wherever there is one.
    return Contributions(
        gather_codec=gather_codecs[0].value,
        reduce_codec=reduce_codecs[0].value,
        storage=storages[0].value,
        backend=backends[0].value,
        constraints=_values(constraints),
        observers=_values(observers),
        adapters=_values(adapters),
        plugin_lines=plugin_lines,
        labels=tuple((a.value, a.member.label) for a in answers),
    )


def _misfits(hook: str, seam: type, answers: Sequence[Answer[Any]]) -> Iterator[str]:
    """Answers that would fail only later, far from the plugin that gave them."""
    for answer in answers:
        who = f"plugin {answer.member.label}: {hook} returned"
        if problem := misfit(answer.value, seam):
            yield f"{who} {problem}"


def _conflicts(
    role: str, answers: Sequence[Answer[Any]], engine: str, group: GroupInfo
) -> Iterator[str]:
    claims = [a for a in answers if a.member.contract.name != engine]
    if len(claims) < 2:
        return
    plugins = " and ".join(claim.member.label for claim in claims)
    parameters = [p.fqn for p in group.parameters]
    shown = ", ".join(parameters[:4]) + (", ..." if len(parameters) > 4 else "")
    yield (
        f"plugins {plugins} both claim {role} of group '{group.name}' ({shown}). Pass only one of "
        "them for this unit, or narrow one so that it returns None here."
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
