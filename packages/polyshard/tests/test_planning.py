"""The plan that tools read: memory of programs by hand, and blocks without planning anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import FSDPModule, MixedPrecisionPolicy, fully_shard
from polyshard.errors import SettingError
from polyshard.planning import (
    GroupPlan,
    planned_groups,
    planned_ranks,
    resharded,
)

WIDTH, WORLD = 512, 4


class Comm:
    """A user's own collective, which is only planned here."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def plan_of(
    backend: str, reshard: bool | int, policy: MixedPrecisionPolicy, comm: Comm | None = None
) -> GroupPlan:
    with planned_ranks(WORLD, backend):  # type: ignore[arg-type]
        with torch.device("meta"):
            layer = nn.Linear(WIDTH, WIDTH, bias=False)
        mesh = init_device_mesh("meta", (WORLD,), mesh_dim_names=("dp",))
        sharded = fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        if comm is not None:
            cast("FSDPModule", sharded).set_custom_all_gather(comm)
            cast("FSDPModule", sharded).set_custom_reduce_scatter(comm)
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
def test_memory_of_a_users_own_collectives(backend: str) -> None:
    """Each sends from one flat tensor and receives in another: all of it, and one rank's part."""
    plan = plan_of(backend, True, MixedPrecisionPolicy(torch.bfloat16, torch.float32), Comm())
    numel = WIDTH * WIDTH
    assert plan.gather.scratch_bytes == 2 * (numel + numel // WORLD)
    assert plan.reduction.scratch_bytes == 4 * (numel + numel // WORLD)
    assert plan.gather.kept_bytes == 2 * numel
    assert plan.reduction.kept_bytes == 0


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
