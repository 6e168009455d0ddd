"""Which rank runs which slots.

[Note: slots of a rank]
Within a step a rank runs ``turns`` slots one after another. Each turn ends in a reduction over the
ranks of the shard axis, so the slots of one turn are neighbours: a reduction sums a whole subtree,
turns continue with sharded sums, and replicas at the end with theirs. Counted from the ground of
the tree: shard ranks, turns, replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from polyshard.plugins.seams import GroupInfo
from polyshard_reproducible.errors import ReproducibleError
from polyshard_reproducible.tree import is_power_of_two


@dataclass(frozen=True)
class Position:
    """Where this rank is among those that share the slots."""

    shards: int
    replicas: int = 1
    shard: int = 0
    replica: int = 0

    def turns(self, slots: int) -> int:
        """How many slots each rank runs."""
        return slots // (self.shards * self.replicas)

    def slot(self, turn: int, slots: int) -> int:
        """Which slot this rank runs in ``turn``. See [Note: slots of a rank]."""
        return (self.replica * self.turns(slots) + turn) * self.shards + self.shard

    def check(self, slots: int, who: str) -> None:
        """Refuse ranks that do not divide the tree.

        Raises:
            ReproducibleError: saying which numbers would.
        """
        ranks = self.shards * self.replicas
        for name, count in (("shard", self.shards), ("replicate", self.replicas)):
            if not is_power_of_two(count):
                raise ReproducibleError(
                    f"reproducible: {who} has {count} ranks on its {name} axis, of which no binary "
                    "tree can be made. Train on 1, 2, 4, 8, ... ranks an axis."
                )
        if slots % ranks:
            raise ReproducibleError(
                f"reproducible: {who} has {ranks} ranks, and there are {slots} slots: every rank "
                f"runs as many, at least one. Give Reproducible(slots={ranks}) or more, the same "
                "in all runs that are compared."
            )


def position_in(group: GroupInfo) -> Position:
    """Where this rank is on the mesh of ``group``.

    Raises:
        ReproducibleError: for meshes whose sums are not made in an order of ours.
    """
    mesh = group.mesh
    if mesh.size() == group.world_size:
        return Position(group.world_size, shard=group.rank)
    who = f"the group of '{group.parameters[0].fqn}'"
    if mesh.ndim != 2 or mesh.size(1) != group.world_size:
        raise ReproducibleError(
            f"reproducible: {who} lives on {mesh.size()} ranks, {group.world_size} of which shard "
            "it: parameters kept whole, and replicas over several axes, are summed by the backend "
            "in an order of its own. Shard over a mesh of one axis, or of two: (replicate, shard)."
        )
    return Position(group.world_size, mesh.size(0), group.rank, mesh.get_local_rank(0))


def groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Process groups that together reach all ranks of the mesh."""
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]


@dataclass(frozen=True)
class Piece:
    """Where this rank is among those that share a slot, as tensor-parallel ranks do."""

    count: int = 1
    index: int = 0


def piece_of(parameters: Iterable[Tensor], mesh: DeviceMesh) -> Piece:
    """That of a model sharded over ``mesh``: by the axes of its parameters that are none of its."""
    data = set(mesh.mesh.flatten().tolist())
    found = Piece()
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        here, count, index = parameter.device_mesh, 1, 0
        for axis in range(here.ndim):
            if not data.issuperset(dist.get_process_group_ranks(here.get_group(axis))):
                count *= here.size(axis)
                index = index * here.size(axis) + here.get_local_rank(axis)
        found = max(found, Piece(count, index), key=lambda piece: piece.count)
    return found
