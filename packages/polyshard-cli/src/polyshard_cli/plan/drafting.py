"""From settings to a document: a model, sharded for ranks that are not there, and sums.

The parts are public to this package, so that a search over settings makes each of them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polyshard.__about__ import __version__
from polyshard.planning import planned_ranks
from polyshard_cli.plan.dry_run.planning import PlannedGroup, policy_of, shard
from polyshard_cli.plan.dry_run.probing import Cost, Probe, cast_parameters, probe
from polyshard_cli.plan.dry_run.units import units_of
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.machines import Machine, load_machine
from polyshard_cli.plan.estimate.memory import Memory, memory_of
from polyshard_cli.plan.estimate.overheads import with_overheads
from polyshard_cli.plan.estimate.timing import Timing, Work, time_of
from polyshard_cli.plan.estimate.traffic import Transfer, traffic_of
from polyshard_cli.plan.report.advice import Case, advice_for
from polyshard_cli.plan.report.document import (
    SCHEMA,
    Document,
    MachineFacts,
    ModelFacts,
    folded,
    group_facts,
)
from polyshard_cli.plan.request.model import Loaded, built, load_model
from polyshard_cli.plan.request.plugins import make_plugins, tensor_parallel, tiers_of
from polyshard_cli.plan.request.settings import Backend, Settings


@dataclass(frozen=True)
class Subject:
    """What all plans of one model for one machine have in common."""

    loaded: Loaded
    machine: Machine
    backend: Backend


@dataclass(frozen=True)
class Running:
    """What a step sends, and how long it takes without what plugins add."""

    traffic: tuple[Transfer, ...]
    timing: Timing | None


@dataclass(frozen=True)
class Estimate:
    """What a step of one rank needs."""

    traffic: tuple[Transfer, ...]
    memory: Memory
    timing: Timing | None
    """``None`` where the model did not run."""


def draft(settings: Settings, loaded: Loaded | None = None) -> Document:
    """The plan that ``settings`` ask for. This process must have no process group.

    Args:
        settings: every choice.
        loaded: a model to plan for, instead of the one that ``settings`` name.

    Raises:
        PlanError: for whatever cannot be planned, with the nearest thing that works.
    """
    subject = subject_of(settings, loaded)
    groups = planned(subject, settings)
    found = probed(subject, settings)
    run = running(subject, settings, groups, found)
    needs = estimated(subject, settings, groups, found, run)
    case = Case(groups, needs.memory, needs.timing, subject.machine, settings.mesh, found.problem)
    asked = settings.sequence or subject.loaded.sequence
    facts = facts_of(
        subject.loaded.name,
        groups,
        settings.optimizer,
        settings.rank,
        settings.local_batch,
        asked,
        settings.accumulate,
    )
    return document_of(case, facts, subject.backend, needs.traffic)


def document_of(
    case: Case, model: ModelFacts, backend: str, traffic: Sequence[Transfer]
) -> Document:
    """What ``case`` and ``traffic`` come to."""
    machine = case.machine
    return Document(
        schema=SCHEMA,
        polyshard=__version__,
        torch=torch.__version__,
        model=model,
        mesh=case.mesh,
        machine=MachineFacts(machine.name, backend, machine.sources, machine.memory_bytes),
        groups=group_facts(case.groups),
        memory=case.memory,
        traffic=folded(traffic),
        timing=case.timing,
        notices=advice_for(case),
    )


def facts_of(
    name: str,
    groups: Sequence[PlannedGroup],
    optimizer: str,
    rank: int,
    batch: int = 0,
    sequence: int = 0,
    accumulate: int = 1,
) -> ModelFacts:
    """The model of ``groups``, and what is done with it."""
    parameters = [p for group in groups for p in group.parameters]
    return ModelFacts(
        name=name,
        parameters=sum(p.elements for p in parameters),
        trainable=sum(p.elements for p in parameters if p.trainable),
        units=len({group.unit for group in groups}),
        batch=batch,
        sequence=sequence,
        optimizer=optimizer,
        rank=rank,
        accumulate=accumulate,
    )


def subject_of(settings: Settings, loaded: Loaded | None = None) -> Subject:
    """The model and the machine of ``settings``; nothing is built yet.

    Raises:
        PlanError: for names that mean nothing.
    """
    machine = load_machine(settings.machine)
    return Subject(loaded or load_model(settings), machine, settings.backend or machine.backend)


def planned(subject: Subject, settings: Settings) -> tuple[PlannedGroup, ...]:
    """The model as the engine plans it.

    Raises:
        PlanError: what the engine or a plugin refuses.
    """
    taken: list[object] = make_plugins(settings)
    with planned_ranks(settings.mesh.ranks, subject.backend, settings.rank):
        model, mesh = built(subject.loaded), settings.mesh.build("meta")
        make = tensor_parallel(settings, subject.loaded, model)
        if make is not None:
            taken.append(_applied(make(mesh[settings.mesh.name("tensor")]), model))
        return shard(model, mesh, taken, settings)


def probed(subject: Subject, settings: Settings) -> Probe:
    """The model as it computes: the same tensor-parallel plan, nothing sharded."""
    loaded = subject.loaded
    with planned_ranks(settings.mesh.ranks, subject.backend, settings.rank):
        # DTensor asks the mesh's device for its neighbours, which the meta device knows nothing of.
        model, mesh = built(loaded), settings.mesh.build("cpu")
        cast_parameters(model, policy_of(settings).param_dtype)
        make = tensor_parallel(settings, loaded, model)
        if make is not None:
            _applied(make(mesh[settings.mesh.name("tensor")]), model)
        sequence = settings.sequence or loaded.sequence
        try:
            with torch.device("meta"):
                inputs = _cast(loaded.inputs(settings.local_batch, sequence), settings)
        except Exception as error:
            return Probe({}, Cost(), problem=f"its inputs: {type(error).__name__}: {error}")
        return probe(model, units_of(model, settings.units), inputs)


def running(
    subject: Subject, settings: Settings, groups: Sequence[PlannedGroup], found: Probe
) -> Running:
    """What follows from a plan and a probe, wherever shards rest."""
    mesh, timing = settings.mesh, None
    traffic = traffic_of(groups, found, mesh, settings.accumulate)
    if not found.problem:
        work = Work(groups, found, traffic, settings.accumulate)
        timing = time_of(work, subject.machine, mesh, settings.optimizer)
    return Running(traffic, timing)


def estimated(
    subject: Subject,
    settings: Settings,
    groups: Sequence[PlannedGroup],
    found: Probe,
    run: Running,
) -> Estimate:
    """The same with tiers, and memory: arithmetic alone."""
    tiers, timing = tiers_of(make_plugins(settings)), run.timing
    memory = memory_of(groups, found, settings.optimizer, tiers, settings.accumulate)
    if timing is not None:
        work = Work(groups, found, run.traffic, settings.accumulate)
        timing = with_overheads(timing, work, tiers, subject.machine, settings.optimizer)
    return Estimate(run.traffic, memory, timing)


def _cast(inputs: Any, settings: Settings) -> Any:
    """Floating-point inputs in the dtype of compute, as the root casts them."""
    dtype = policy_of(settings).param_dtype

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return inputs if dtype is None else tree_map_only(Tensor, cast, inputs)


def _applied(plugin: object, model: nn.Module) -> object:
    try:
        plugin.apply(model)  # type: ignore[attr-defined]
    except ValueError as error:
        raise PlanError(f"tensor parallelism does not fit the model: {error}") from error
    return plugin
