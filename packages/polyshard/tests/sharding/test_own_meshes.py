"""Parameters on a mesh of their own: what its ranks compare, and who learns of a difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from polyshard import ShardPlacement, fully_shard
from polyshard.errors import PlanMismatchError
from polyshard_testing import raises_in_step, ranks


class Halves(nn.Module):
    """A layer of all ranks, and one of ``rows`` that only some share."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(rows)
        self.own = nn.Linear(4, rows)
        torch.manual_seed(0)
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(self.shared(x))
        return out


def sharded(rows: int, *, apart: bool = True) -> Any:
    """By halves of the world, with its ranks in order, if ``apart``."""
    device = torch.get_default_device().type
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("half", "shard"))
    model = Halves(rows)
    own = set(model.own.parameters()) if apart else set()
    chosen = ShardPlacement(Shard(0), mesh["shard"])
    return fully_shard(model, shard_placement_fn=lambda p: chosen if p in own else None)


@ranks(4)
def test_a_difference_within_one_mesh_is_told_to_all(rank: int, size: int) -> None:
    model = sharded([3, 3, 3, 4][rank])
    for _ in range(2):  # at every forward
        with raises_in_step(PlanMismatchError, r"own\.weight \((3|4), 4\)"):
            model(torch.ones(1, 4))


@ranks(4)
def test_a_mesh_that_some_alone_have(rank: int, size: int) -> None:
    """Never a hang: meshes are compared by all before any compares its own."""
    model = sharded(3, apart=rank < 2)
    with raises_in_step(PlanMismatchError, r"group \(root\)#1: mesh (cpu|sim|cuda)"):
        model(torch.ones(1, 4))
