"""The same document for a model that is sharded already, on the ranks it is sharded on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.distributed as dist
from torch import nn

from polyshard.errors import SettingError
from polyshard.planning import PlannedGroup as Living
from polyshard.planning import planned_groups as living_groups
from polyshard_cli.plan.drafting import document_of, facts_of
from polyshard_cli.plan.dry_run.planning import axis_names, planned_groups
from polyshard_cli.plan.dry_run.probing import Cost, Probe
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.machines import load_machine
from polyshard_cli.plan.estimate.step import step_of
from polyshard_cli.plan.report.document import Document
from polyshard_cli.plan.request.mesh import Axis, MeshSpec, Role
from polyshard_cli.plan.request.plugins import tiers_of
from polyshard_cli.plan.request.settings import OptimizerName

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
    facts = facts_of(type(model).__name__, groups, optimizer, dist.get_rank())
    return document_of(step, facts, dist.get_backend())


def _mesh_of(groups: Iterable[Living]) -> MeshSpec:
    """The one mesh that all groups are on, with the axes of tensor parallelism."""
    found = dict.fromkeys(MeshSpec(tuple(_axes_of(group))) for group in groups)
    # A group without tensor-parallel parameters knows the data axes alone.
    largest = max(found, key=lambda mesh: len(mesh.axes))
    for mesh in found:
        if not set(mesh.axes) <= set(largest.axes):
            raise PlanError(
                "groups of the model are on different meshes, and a document is of one: "
                f"{_words(largest)}, and {_words(mesh)}; polyshard.describe(model) shows each group"
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


def _words(mesh: MeshSpec) -> str:
    return ",".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
