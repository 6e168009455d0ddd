"""The plan that tools read: memory of programs by hand, and blocks without planning anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard.errors import SettingError
from polyshard.planning import (
    GroupPlan,
    planned_groups,
    planned_ranks,
    resharded,
)

WIDTH, WORLD = 512, 4


def plan_of(backend: str, reshard: bool | int, policy: MixedPrecisionPolicy) -> GroupPlan:
    with planned_ranks(WORLD, backend):  # type: ignore[arg-type]
        with torch.device("meta"):
            layer = nn.Linear(WIDTH, WIDTH, bias=False)
        mesh = init_device_mesh("meta", (WORLD,), mesh_dim_names=("dp",))
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        (group,) = planned_groups(layer)
        assert (group.unit, group.shard_axis, group.rank) == ("", 0, 0)
        assert group.mesh.mesh_dim_names == ("dp",)
        assert [tuple(p.shape) for p in group.parameters] == [(WIDTH, WIDTH)]
        return group.plan


@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16])
def test_memory_of_transfers_from_where_they_rest(param: torch.dtype) -> None:
    """gloo: gradients leave from where they are; those of each peer arrive beside the sum."""
    plan = plan_of("gloo", True, MixedPrecisionPolicy(param, torch.float32))
    whole = WIDTH * WIDTH * param.itemsize
    assert (plan.gather.kept_bytes, plan.gather.scratch_bytes) == (whole, 0)
    assert plan.gather.traffic.sent == plan.gather_bytes == (WORLD - 1) * whole // WORLD
    beside = WORLD - 1 - (param == torch.float32)  # the first may arrive in the sum itself
    assert plan.reduction.scratch_bytes == beside * whole // WORLD
    assert plan.reduction.kept_bytes == 0


def test_memory_of_transfers_that_are_cast() -> None:
    """Collectives send gradients in the dtype of sums."""
    plan = plan_of("nccl", True, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert plan.reduction.scratch_bytes == WIDTH * WIDTH * 4
    plan = plan_of("nccl", True, MixedPrecisionPolicy())
    assert plan.reduction.scratch_bytes == 0


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_blocks_are_worked_out_without_planning_anew(backend: str) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    known, real = (plan_of(backend, reshard, policy) for reshard in (True, 2))
    found = resharded(known, 2)
    assert found.reshard_after_forward == real.reshard_after_forward == 2
    assert found.regather.traffic == real.regather.traffic
    assert found.regather.kept_bytes == real.regather.kept_bytes
    assert found.regather.scratch_bytes == real.regather.scratch_bytes
    assert real.regather.kept_bytes == WIDTH * WIDTH * 2 // 2  # all, less the slice of two
    assert resharded(known, False).regather_bytes == known.gather_bytes
    assert resharded(known, WORLD).reshard_after_forward is True


def test_a_model_that_is_not_sharded_has_no_groups() -> None:
    with pytest.raises(SettingError, match="no parameters sharded"):
        planned_groups(nn.Linear(2, 2, device="meta"))
