"""Pipelines whose stages end an iteration through public handles, as torch 2.15's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from toy_models import full
from toy_observers import Watching

import polyshard
from polyshard.engine.root import groups_of
from polyshard_testing import ranks

WIDTH = 6
STEPS = 3
MICROBATCHES = 4

pytestmark = pytest.mark.skipif(
    not hasattr(torch_fsdp.FSDPModule, "finalize_backward"),
    reason="pipeline stages before torch 2.15 go through private state of torch's engine",
)


class Stage(nn.Module):
    """Two blocks that are units of their own, and a norm that the root takes."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.gelu(block(x))
        out: Tensor = self.norm(x)
        return out


def sharded(index: int, mesh: DeviceMesh, function: Callable[..., Any], **kwargs: Any) -> Any:
    stage = Stage(index)
    for block in stage.blocks:
        function(block, mesh=mesh, **kwargs)
    return function(stage, mesh=mesh, **kwargs)


def mesh_of(size: int) -> DeviceMesh:
    return init_device_mesh(
        torch.get_default_device().type, (2, size // 2), mesh_dim_names=("pp", "dp")
    )


def stages_of(modules: dict[int, Any], mesh: DeviceMesh) -> list[PipelineStage]:
    count = 2 * len(modules)
    group = mesh["pp"].get_group()
    return [
        PipelineStage(m, i, count, torch.get_default_device(), group=group)
        for i, m in modules.items()
    ]


def train(schedule: type[Any], mesh: DeviceMesh, modules: dict[int, Any]) -> list[float]:
    """Losses of some steps, on the ranks of the last stage."""
    given: Any = stages_of(modules, mesh)
    last = 2 * len(modules) - 1
    options = {"scale_grads": True}
    runner = schedule(given if len(given) > 1 else given[0], MICROBATCHES, F.mse_loss, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in modules.values()]
    losses: list[float] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
        x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator)
        collected: list[Tensor] = []
        target = {"target": y, "losses": collected} if last in modules else {}
        runner.step(*((x,) if 0 in modules else ()), **target)
        losses += [float(loss.detach()) for loss in collected]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("frees", [False, True], ids=["kept", "freed"])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
@ranks(2, 4)
def test_stages_train_as_with_torch(rank: int, size: int, schedule: type[Any], frees: bool) -> None:
    mesh = mesh_of(size)
    place = mesh["pp"].get_local_rank()
    held = [place, place + 2] if schedule is ScheduleInterleaved1F1B else [place]
    runs = []
    for function in (torch_fsdp.fully_shard, polyshard.fully_shard):
        modules = {i: sharded(i, mesh["dp"], function, reshard_after_forward=frees) for i in held}
        runs.append((modules, train(schedule, mesh, modules)))
    (theirs, expected), (ours, found) = runs
    assert found == expected
    assert bool(found) is (2 * len(held) - 1 in held)
    for index, stage in ours.items():
        pairs = zip(stage.parameters(), theirs[index].parameters(), strict=True)
        assert all(torch.equal(full(a.detach()), full(b.detach())) for a, b in pairs)
        assert all(group.is_sharded for group in groups_of(stage))


@ranks(4)
def test_a_group_is_reduced_once_a_step(rank: int, size: int) -> None:
    mesh, watching = mesh_of(size), Watching()
    place = mesh["pp"].get_local_rank()
    modules = {place: sharded(place, mesh["dp"], polyshard.fully_shard, plugins=[watching])}
    train(Schedule1F1B, mesh, modules)
    events = [event.split()[:2] for event in watching.watcher.events]
    for name in ("blocks.0", "blocks.1", "(root)"):
        assert events.count(["reduce", name]) == STEPS
    assert events.count(["step", "end"]) >= STEPS  # one more where torch tries out the backward
    assert events[-1] == ["step", "end"]


@ranks(2)
def test_stages_that_share_their_communication_are_known(rank: int, size: int) -> None:
    """Reductions that are waited for later are for stages that do not share, torch says."""
    mesh = mesh_of(size)
    for share in (False, True):
        place = mesh["pp"].get_local_rank()
        modules = {i: sharded(i, mesh["dp"], polyshard.fully_shard) for i in (place, place + 2)}
        if share:
            polyshard.share_comm_ctx(list(modules.values()))
        stages: Any = stages_of(modules, mesh)
        runner: Any = ScheduleInterleaved1F1B(stages, MICROBATCHES, F.mse_loss)
        if share:
            with pytest.raises(ValueError, match="share a communication context"):
                runner._validate_deferred_gradient_reduction()
        else:
            runner._validate_deferred_gradient_reduction()
