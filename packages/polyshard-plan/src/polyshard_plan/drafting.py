"""From settings to a document: a model, sharded for ranks that are not there, and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polyshard.__about__ import __version__
from polyshard._torch.planned import planned_ranks
from polyshard_plan.dry_run.planning import PlannedGroup, policy_of, shard
from polyshard_plan.dry_run.probing import Cost, Probe, cast_parameters, probe
from polyshard_plan.dry_run.units import units_of
from polyshard_plan.errors import PlanError
from polyshard_plan.estimate.machines import load_machine
from polyshard_plan.estimate.memory import memory_of
from polyshard_plan.estimate.timing import time_of
from polyshard_plan.estimate.traffic import traffic_of
from polyshard_plan.report.advice import Case, advice_for
from polyshard_plan.report.document import (
    SCHEMA,
    Document,
    MachineFacts,
    ModelFacts,
    folded,
    group_facts,
)
from polyshard_plan.request.model import Loaded, built, load_model
from polyshard_plan.request.plugins import make_plugins, tensor_parallel, tiers_of
from polyshard_plan.request.settings import Settings

__all__ = ["draft"]


def draft(settings: Settings, loaded: Loaded | None = None) -> Document:
    """The plan that ``settings`` ask for. This process must have no process group.

    Args:
        settings: every choice.
        loaded: a model to plan for, instead of the one that ``settings`` name.

    Raises:
        PlanError: for whatever cannot be planned, with the nearest thing that works.
    """
    machine = load_machine(settings.machine)
    backend = settings.backend or machine.backend
    loaded = loaded or load_model(settings)
    plugins = make_plugins(settings)
    with planned_ranks(settings.mesh.ranks, backend, settings.rank):
        groups = _groups(settings, loaded, list(plugins))
        found = _probed(settings, loaded)
    traffic = traffic_of(groups, found, settings.mesh)
    memory = memory_of(groups, found, settings.optimizer, tiers_of(plugins))
    timing = None
    if not found.problem:
        timing = time_of(groups, found, traffic, machine, settings.mesh, settings.optimizer)
    case = Case(groups, memory, timing, machine, settings.mesh, found.problem)
    return Document(
        schema=SCHEMA,
        polyshard=__version__,
        torch=torch.__version__,
        model=_facts(settings, loaded, groups),
        mesh=settings.mesh,
        machine=MachineFacts(machine.name, backend, machine.sources, machine.memory_bytes),
        groups=group_facts(groups),
        memory=memory,
        traffic=folded(traffic),
        timing=timing,
        notices=advice_for(case),
    )


def _groups(settings: Settings, loaded: Loaded, plugins: list[object]) -> tuple[PlannedGroup, ...]:
    """The model as the engine plans it."""
    model, mesh = built(loaded), settings.mesh.build("meta")
    make = tensor_parallel(settings, loaded, model)
    if make is not None:
        plugins.append(_applied(make(mesh[settings.mesh.name("tensor")]), model))
    return shard(model, mesh, plugins, settings)


def _probed(settings: Settings, loaded: Loaded) -> Probe:
    """The model as it computes: the same tensor-parallel plan, nothing sharded."""
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


def _facts(settings: Settings, loaded: Loaded, groups: tuple[PlannedGroup, ...]) -> ModelFacts:
    parameters = [p for group in groups for p in group.parameters]
    return ModelFacts(
        name=loaded.name,
        parameters=sum(p.elements for p in parameters),
        trainable=sum(p.elements for p in parameters if p.trainable),
        units=len({group.unit for group in groups}),
        batch=settings.local_batch,
        sequence=settings.sequence or loaded.sequence,
        optimizer=settings.optimizer,
        rank=settings.rank,
    )
