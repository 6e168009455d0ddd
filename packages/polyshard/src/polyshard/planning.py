"""What tools that plan a run read of core: groups, their programs, and ranks that are not there.

``fully_shard`` a model inside of :func:`planned_ranks`, or any model on real ranks, and read
:func:`planned_groups`. Bytes and memory of a step are sums over the operations of its programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from polyshard._torch.planned import planned_ranks
from polyshard.description import describe, identities_of
from polyshard.engine.root import units_below
from polyshard.group.plan import GroupPlan
from polyshard.group.transfers import readable
from polyshard.program.ops import NO_TRAFFIC, OpPlan, ProgramPlan, Traffic
from polyshard.sharding.layout import block_padded

__all__ = [
    "GroupPlan",
    "OpPlan",
    "PlannedGroup",
    "ProgramPlan",
    "Traffic",
    "identities_of",
    "planned_groups",
    "planned_ranks",
    "readable",
    "resharded",
]


@dataclass(frozen=True)
class PlannedGroup:
    """One parameter group of a sharded model."""

    unit: str
    """Name of the module that ``fully_shard`` was called on; empty for the model itself."""
    plan: GroupPlan
    """As :func:`polyshard.describe` shows it."""
    parameters: tuple[DTensor, ...]
    """The sharded parameters, in the order of the plan."""
    mesh: DeviceMesh
    """Its data-parallel mesh."""
    shard_axis: int | None
    """The axis of ``mesh`` that shards; others replicate."""
    rank: int
    """Position of this rank on that axis."""
    plugins: tuple[object, ...]
    """The stack of plugins of its unit."""


def planned_groups(model: nn.Module) -> tuple[PlannedGroup, ...]:
    """All groups of ``model``, outermost units first, in the order of ``describe(model).groups``.

    Raises:
        SettingError: when nothing of ``model`` is sharded.
    """
    return tuple(_planned(model))


def _planned(model: nn.Module) -> Iterator[PlannedGroup]:
    plans = iter(describe(model).groups)
    for name, _, unit in units_below(model):
        for group in unit.groups:
            roles, values = group.roles, (p.parameter for p in group.shards.parameters)
            yield PlannedGroup(
                unit=name,
                plan=next(plans),
                parameters=tuple(cast("DTensor", value) for value in values),
                mesh=roles.mesh,
                shard_axis=roles.shard_axis,
                rank=roles.shard_rank,
                plugins=tuple(group.stack.plugins),
            )


def resharded(plan: GroupPlan, reshard_after_forward: bool | int) -> GroupPlan:
    """``plan``, made without blocks, as ``fully_shard`` would make it with another setting."""
    size, layout = reshard_after_forward, plan.layout
    if isinstance(size, bool) or layout.world_size <= size:
        return replace(plan, reshard_after_forward=bool(size))
    # See [Note: blocks] of the gathers.
    whole = block_padded(layout.unsharded_numel, size) * plan.dtypes.param.itemsize
    moved = Traffic(whole // size * (size - 1), whole // size * (size - 1))
    ops = (
        _op("acquire", "compute", takes=whole),
        _op("gather", "gather", traffic=moved),
        _op("drop slice", "compute", frees=whole // size),
    )
    block = ProgramPlan("unshard from a block", ops, 2)
    programs = (plan.gather, block, plan.reduction)
    return replace(plan, reshard_after_forward=size, programs=programs)


def _op(
    name: str, lane: str, *, takes: int = 0, frees: int = 0, traffic: Traffic = NO_TRAFFIC
) -> OpPlan:
    return OpPlan(name, lane, (), (), "polyshard", traffic, takes, frees)
