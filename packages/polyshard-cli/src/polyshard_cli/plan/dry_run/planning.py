"""The engine's own plan of a model that is on no device, for ranks that are not there.

One process is one rank of the mesh, over a process group that moves nothing; the model is on the
meta device. ``fully_shard`` and ``describe`` are those of a run, and so are their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from polyshard import MixedPrecisionPolicy, fully_shard, planning
from polyshard.planning import GroupPlan
from polyshard_cli.plan.dry_run.units import units_of
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.request.names import called, imported
from polyshard_cli.plan.request.settings import Settings


@dataclass(frozen=True)
class Cut:
    """One dim of a parameter: its size in elements, and the axes that divide it."""

    size: int
    axes: tuple[str, ...]
    local: int
    """Elements of it on the planned rank."""


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter, by mesh axis and by dim."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    by_axis: Mapping[str, str]
    """What each axis of its mesh does to it: ``Shard(0)``, ``Replicate()``."""
    by_dim: tuple[Cut, ...]
    way: str
    """How it travels: ``direct``, ``coalesced``, ``packed``, ``payload``, ``in place``."""
    local_elements: int
    padding_bytes: int
    """Of the planned rank's chunk, at rest."""

    @property
    def elements(self) -> int:
        """Of the whole parameter."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class PlannedGroup:
    """A parameter group: the engine's plan, and both views of each parameter."""

    unit: str
    """Name of the module; empty for the root."""
    plan: GroupPlan
    parameters: tuple[PlannedParameter, ...]

    @property
    def is_root(self) -> bool:
        """Whether it belongs to the model itself, which runs around all units."""
        return not self.unit

    @property
    def trainable_elements(self) -> int:
        """Of trainable parameters, on the planned rank, without padding."""
        return sum(p.local_elements for p in self.parameters if p.trainable)


def policy_of(settings: Settings) -> MixedPrecisionPolicy:
    """The dtypes that ``settings`` ask for."""
    if not settings.bf16:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(
    model: nn.Module, mesh: DeviceMesh, plugins: Sequence[Any], settings: Settings
) -> tuple[PlannedGroup, ...]:
    """Shard ``model`` unit by unit, and read the plan: the root first, then units as they lie."""
    data = mesh[settings.mesh.data_axes]
    keywords: dict[str, Any] = {
        "mesh": data,
        "plugins": list(plugins),
        "mp_policy": policy_of(settings),
        "reshard_after_forward": settings.reshard,
    }
    if settings.placement:
        said = f"--placement {settings.placement}"
        placement = partial(called, imported(settings.placement, "--placement"), said)
        keywords["shard_placement_fn"] = placement
    units = units_of(model, settings.units)
    for name, members in (*units.items(), ("", (model,))):
        try:
            fully_shard(list(members) if len(members) > 1 else members[0], **keywords)
        except ValueError as error:
            where = f"unit {name}" if name else "the model"
            raise PlanError(f"{where} cannot be sharded so: {error}") from error
    return planned_groups(model)


def planned_groups(model: nn.Module) -> tuple[PlannedGroup, ...]:
    """Every group of ``model``, which is sharded, with both views of its parameters."""
    return tuple(
        PlannedGroup(group.unit, group.plan, tuple(_parameters(group)))
        for group in planning.planned_groups(model)
    )


def axis_names(group: planning.PlannedGroup) -> tuple[str, ...]:
    """Of its data-parallel mesh; by what they do, where the mesh has none."""
    return group.mesh.mesh_dim_names or tuple(
        "dp" if axis == group.shard_axis else f"replicate{axis or ''}"
        for axis in range(group.mesh.ndim)
    )


def _parameters(group: planning.PlannedGroup) -> Iterator[PlannedParameter]:
    plan = group.plan
    for info, placed, way, value in zip(
        plan.parameters, plan.layout.parameters, plan.ways, group.parameters, strict=True
    ):
        names = value.device_mesh.mesh_dim_names or axis_names(group)
        axes = dict(zip(names, value.placements, strict=True))
        cuts: dict[int | None, list[str]] = {}
        for name, placement in axes.items():
            if not placement.is_replicate():
                cuts.setdefault(getattr(placement, "dim", None), []).append(name)
        own, local = placed.local_numel(group.rank), placed.local_shape(group.rank)
        if len(local) != value.ndim:
            local = tuple(value.shape)
        yield PlannedParameter(
            name=info.fqn,
            shape=tuple(value.shape),
            dtype=str(info.dtype).removeprefix("torch."),
            trainable=info.requires_grad,
            by_axis={name: _words(placement) for name, placement in axes.items()},
            by_dim=tuple(
                Cut(size, tuple(cuts.get(dim, ())), local[dim])
                for dim, size in enumerate(value.shape)
            ),
            way=way.kind,
            local_elements=own,
            padding_bytes=(placed.chunk_numel - own) * plan.layout.itemsize,
        )


def _words(placement: Placement) -> str:
    if placement.is_replicate():
        return "Replicate()"
    dim = getattr(placement, "dim", None)
    return str(placement) if dim is None else f"Shard({dim})"
