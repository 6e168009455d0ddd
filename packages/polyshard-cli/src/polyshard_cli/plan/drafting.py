"""From settings to a document: a model, sharded for ranks that are not there, and sums.

The parts are public to this package, so that a search over settings makes each of them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polyshard.errors import SettingError
from polyshard.planning import PlannedGroup as Living
from polyshard.planning import planned_groups as living_groups
from polyshard.planning import planned_ranks
from polyshard_cli.plan.dry_run.planning import (
    PlannedGroup,
    axis_names,
    planned_groups,
    policy_of,
    shard,
)
from polyshard_cli.plan.dry_run.probing import Cost, Probe, probe
from polyshard_cli.plan.dry_run.units import units_of
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.machines import Machine, load_machine
from polyshard_cli.plan.estimate.timing import Step, step_of
from polyshard_cli.plan.report.document import Document, document_of
from polyshard_cli.plan.request.mesh import Axis, MeshSpec, Role
from polyshard_cli.plan.request.model import Loaded, built, load_model
from polyshard_cli.plan.request.plugins import divided, make_plugins, tiers_of
from polyshard_cli.plan.request.settings import Backend, OptimizerName, Settings


@dataclass(frozen=True)
class Subject:
    """What all plans of one model for one machine have in common."""

    loaded: Loaded
    machine: Machine
    backend: Backend


def draft(settings: Settings, loaded: Loaded | None = None) -> Document:
    """The plan that ``settings`` ask for. This process must have no process group.

    Args:
        settings: every choice.
        loaded: a model to plan for, instead of the one that ``settings`` name.

    Raises:
        PlanError: for whatever cannot be planned, with the nearest thing that works.
    """
    subject = subject_of(settings, loaded)
    step = estimated(subject, settings, planned(subject, settings), probed(subject, settings))
    return document_of(
        step,
        subject.backend,
        name=subject.loaded.name,
        optimizer=settings.optimizer,
        rank=settings.rank,
        batch=settings.local_batch,
        sequence=settings.sequence or subject.loaded.sequence,
        accumulate=settings.accumulate,
    )


def subject_of(settings: Settings, loaded: Loaded | None = None) -> Subject:
    """The model and the machine of ``settings``; nothing is built yet."""
    machine = load_machine(settings.machine)
    return Subject(loaded or load_model(settings), machine, settings.backend or machine.backend)


def planned(subject: Subject, settings: Settings) -> tuple[PlannedGroup, ...]:
    """The model as the engine plans it."""
    taken = make_plugins(settings)
    with planned_ranks(settings.mesh.ranks, subject.backend, settings.rank):
        model, mesh = built(subject.loaded), settings.mesh.build("meta")
        taken += divided(settings, subject.loaded, model, mesh)
        return shard(model, mesh, taken, settings)


def probed(subject: Subject, settings: Settings) -> Probe:
    """The model as it computes: the same tensor-parallel plan, nothing sharded."""
    loaded = subject.loaded
    with planned_ranks(settings.mesh.ranks, subject.backend, settings.rank):
        # DTensor asks the mesh's device for its neighbours, which the meta device knows nothing of.
        model, mesh = built(loaded), settings.mesh.build("cpu")
        dtype = policy_of(settings).param_dtype

        def cast(tensor: Tensor) -> Tensor:
            """As the root casts its inputs to the dtype of compute."""
            return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor

        for parameter in model.parameters():  # before tensor parallelism, which keeps their dtype
            parameter.data = cast(parameter.data)
        divided(settings, loaded, model, mesh)
        sequence = settings.sequence or loaded.sequence
        try:
            with torch.device("meta"):
                inputs = loaded.inputs(settings.local_batch, sequence)
                inputs = tree_map_only(Tensor, cast, inputs)
        except Exception as error:
            return Probe({}, Cost(), problem=f"its inputs: {type(error).__name__}: {error}")
        return probe(model, units_of(model, settings.units), inputs)


def estimated(
    subject: Subject, settings: Settings, groups: tuple[PlannedGroup, ...], found: Probe
) -> Step:
    """The step of ``groups``, whose units cost what ``found`` says."""
    chosen = settings.mesh, settings.optimizer, tiers_of(make_plugins(settings))
    return step_of(groups, found, subject.machine, *chosen, settings.accumulate)


NOT_RUN = "a model that is sharded already is described, not run"


def describe(
    model: nn.Module, *, optimizer: OptimizerName = "adamw", machine: str = "h100x8"
) -> Document:
    """What a step of ``model`` will need on this rank, from the plan that it runs by.

    Groups, traffic and memory at rest are those that :func:`polyshard_cli.plan.draft` says for the
    same model. What only running it would tell (activations, collectives of its own, time) is not
    in it: a notice says so.

    Args:
        model: ``fully_shard`` was called on it and on its units. It is not changed, and nothing is
            communicated.
        optimizer: whose state is counted.
        machine: whose memory and links notices are about; a name, or a file of ``--measure``.

    Raises:
        PlanError: for a model that is not sharded, or whose groups are on different meshes.
    """
    try:
        owners = living_groups(model)
    except SettingError as error:
        raise PlanError(
            f"{type(model).__name__} is not sharded by polyshard: call fully_shard on it and its "
            "units first, or plan it with draft(Settings(...))"
        ) from error
    groups, target = planned_groups(model), load_machine(machine)
    mesh, found = _mesh_of(owners), Probe({}, Cost(), problem=NOT_RUN)
    tiers = tiers_of([plugin for owner in owners for plugin in owner.plugins])
    step = step_of(groups, found, target, mesh, optimizer, tiers)
    name, rank = type(model).__name__, dist.get_rank()
    return document_of(step, dist.get_backend(), name=name, optimizer=optimizer, rank=rank)


def _mesh_of(groups: Iterable[Living]) -> MeshSpec:
    """The one mesh that all groups are on, with the axes of tensor parallelism."""
    found = dict.fromkeys(MeshSpec(tuple(_axes_of(group))) for group in groups)
    # A group without tensor-parallel parameters knows the data axes alone.
    largest = max(found, key=lambda mesh: len(mesh.axes))
    for mesh in found:
        if not set(mesh.axes) <= set(largest.axes):
            raise PlanError(
                "groups of the model are on different meshes, and a document is of one: "
                f"{largest.text}, and {mesh.text}; polyshard.describe(model) shows each group"
            )
    return largest


def _axes_of(group: Living) -> Iterator[Axis]:
    names = axis_names(group)
    for axis, name in enumerate(names):
        role: Role = "shard" if axis == group.shard_axis else "replicate"
        yield Axis(name, group.mesh.size(axis), role)
    others = {
        (name, mesh.size(axis))
        for mesh in (value.device_mesh for value in group.parameters)
        for axis, name in enumerate(mesh.mesh_dim_names or ())
        if name not in names
    }
    for name, size in sorted(others):
        yield Axis(name, size, "tensor")
