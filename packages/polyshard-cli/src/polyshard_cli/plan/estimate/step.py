"""A step of one rank, and what it needs: bytes, memory, and time on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyshard_cli.plan.dry_run.planning import PlannedGroup
from polyshard_cli.plan.dry_run.probing import Probe
from polyshard_cli.plan.estimate.machines import Machine
from polyshard_cli.plan.estimate.memory import Memory, memory_of
from polyshard_cli.plan.estimate.timing import Timing, Work, time_of, with_overheads
from polyshard_cli.plan.estimate.traffic import Transfer, traffic_of
from polyshard_cli.plan.request.mesh import MeshSpec
from polyshard_cli.plan.request.settings import OptimizerName


@dataclass(frozen=True)
class Step:
    """Everything that is known of a step."""

    groups: tuple[PlannedGroup, ...]
    found: Probe
    machine: Machine
    mesh: MeshSpec
    traffic: tuple[Transfer, ...]
    memory: Memory
    timing: Timing | None
    """``None`` where the model did not run."""


def step_of(
    groups: tuple[PlannedGroup, ...],
    found: Probe,
    machine: Machine,
    mesh: MeshSpec,
    optimizer: OptimizerName,
    tiers: Mapping[str, Any],
    micro_batches: int = 1,
) -> Step:
    """What follows from a plan and a probe: arithmetic alone."""
    traffic = traffic_of(groups, found, mesh, micro_batches)
    memory = memory_of(groups, found, optimizer, tiers, micro_batches)
    timing = None
    if not found.problem:
        work = Work(groups, found, traffic, micro_batches)
        timing = time_of(work, machine, mesh, optimizer)
        timing = with_overheads(timing, work, tiers, machine, optimizer)
    return Step(groups, found, machine, mesh, traffic, memory, timing)
