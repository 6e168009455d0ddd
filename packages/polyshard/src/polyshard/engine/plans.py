"""All ranks of a model compare their plans before the first collective.

[Note: digest]
Ranks of the data-parallel mesh compare everything. Sizes of what a rank shards may differ on other
axes, so groups with a mesh of their own (experts) are compared whole by its ranks alone, and where
the sharded parameters lie on a larger mesh (tensor parallelism), its ranks compare what must hold
on all of them. A larger mesh counts only where parameters of the root lie on it, so
the stages of a pipeline, which run different models, do not meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from polyshard.__about__ import __version__
from polyshard._torch.private import root_mesh
from polyshard.agreement.meeting import agree, reporting
from polyshard.engine.initial_values import notes_of, warn_of_different
from polyshard.engine.unit import Unit
from polyshard.failures import failure_handler
from polyshard.group.plan import GroupPlan
from polyshard.group.planner import plan_of
from polyshard.sharding.mesh import MeshRoles

MAX_AXES = 5


def audiences(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """Every set of ranks in which another may wait for this one, which works on ``mesh``.

    All slices of the whole mesh that hold this rank: a rank that fails early may not know yet which
    other axes its model would have had.
    """
    root = root_mesh(mesh).mesh
    place = (root == dist.get_rank()).nonzero()
    found = {tuple(sorted(mesh.mesh.flatten().tolist()))}
    if len(place) and root.ndim <= MAX_AXES:
        at = place[0].tolist()
        for kept in itertools.product((False, True), repeat=root.ndim):
            part = root[tuple(slice(None) if k else a for k, a in zip(kept, at, strict=True))]
            found.add(tuple(sorted(part.flatten().tolist())))
    return sorted(ranks for ranks in found if len(ranks) > 1)


def compare_plans(roles: MeshRoles, units: Sequence[Unit]) -> None:
    """Compare the plans of ``units``, which lie on the mesh of ``roles``. See [Note: digest].

    Warns on every rank of initial values that differ. See [Note: initial values].

    Raises:
        PlanMismatchError: on every rank.
    """
    wide = ranks_of(roles, units)
    notes = notes_of(value for unit in units for value in unit.initial_values)
    every: list[GroupPlan] = []
    own: dict[tuple[int, ...], list[GroupPlan]] = {roles.ranks: []}
    for unit in units:
        for group in unit.groups:
            plan, ranks = plan_of(group, frees=unit.reshards_in_training), group.roles.ranks
            every.append(plan)
            is_inside = set(ranks) < set(roles.ranks)
            own.setdefault(ranks if is_inside else roles.ranks, []).append(plan)
    everywhere = own.pop(roles.ranks)
    apart = [plan for plans in own.values() for plan in plans]
    told = [*_all_lines(everywhere), *_lines(apart, GroupPlan.shared_lines)]
    differing = agree(roles.ranks, told, notes=notes.get(roles.ranks, {}))
    if wide != roles.ranks:
        agree(wide, _lines(every, GroupPlan.shared_lines))
    for ranks, plans in own.items():
        differing |= agree(ranks, _all_lines(plans), notes=notes.get(ranks, {}))
    if own:
        agree(roles.ranks, ())  # all learn of a difference among some
    for unit in units:
        unit.initial_values = ()
    warn_of_different(differing)


def compare_early(unit: Unit) -> None:
    """Compare the plans of a unit that is gathered by hand before any root ran forward.

    Raises:
        PlanMismatchError: on every rank.
    """
    with reporting(partial(audiences, unit.roles.mesh)):
        compare_plans(unit.roles, [unit])


def ranks_of(roles: MeshRoles, units: Sequence[Unit]) -> tuple[int, ...]:
    """The ranks that share ``units`` with this one, in ascending order."""
    found = set(roles.ranks)
    for mesh in _meshes(units):
        ranks = set(mesh.mesh.flatten().tolist())
        if ranks.issuperset(roles.ranks):
            found |= ranks
    return tuple(sorted(found))


def _meshes(units: Sequence[Unit]) -> Iterator[DeviceMesh]:
    seen: set[int] = set()
    for group in (group for unit in units for group in unit.groups):
        held = (cast("DTensor", p.parameter).device_mesh for p in group.shards.parameters)
        for mesh in (group.roles.mesh, *held):
            if id(mesh) not in seen:
                seen.add(id(mesh))
                yield mesh


def _all_lines(plans: Sequence[GroupPlan]) -> list[str]:
    programs = [line for plan in plans for line in plan.program_lines()]  # what follows from plans
    return [*_lines(plans, GroupPlan.lines), *programs]


def _lines(plans: Sequence[GroupPlan], facts: Callable[[GroupPlan], tuple[str, ...]]) -> list[str]:
    versions = f"polyshard {__version__}, torch {torch.__version__}"
    failures = f"failures are left to {failure_handler().name}"
    return [versions, failures, *(line for plan in plans for line in facts(plan))]
