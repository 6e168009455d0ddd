"""Pipelines of sharded stages: torch's schedules drive them as they drive its own engine's."""

from __future__ import annotations

import itertools
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
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from toy_models import full
from toy_observers import Watching

import polyshard
from polyshard import MixedPrecisionPolicy
from polyshard.engine.root import groups_of
from polyshard_testing import ranks

PIPELINE = 2
WIDTH = 6
STEPS = 3
MICROBATCHES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Stage(nn.Module):
    """Two blocks that are units of their own, and a norm that the root takes."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def sharded(stage: Stage, mesh: DeviceMesh, fully_shard: Any, **kwargs: Any) -> Stage:
    for block in stage.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(stage, mesh=mesh, **kwargs)
    return stage


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, rows, WIDTH, generator=generator)
    return x, y


def stage_indices(pipeline_rank: int, schedule: type[Any]) -> list[int]:
    """Which stages a rank of the pipeline holds."""
    if schedule in (ScheduleGPipe, Schedule1F1B):
        return [pipeline_rank]
    if schedule is ScheduleZBVZeroBubble:
        return [pipeline_rank, 2 * PIPELINE - 1 - pipeline_rank]
    return [pipeline_rank, pipeline_rank + PIPELINE]


def train(
    schedule: type[Any], mesh: DeviceMesh, shard: Callable[[Stage], Stage]
) -> tuple[dict[int, Stage], list[float]]:
    """This rank's stages after some steps, and the losses where the last stage is."""
    pipeline, data = mesh["pp"], mesh["dp"]
    indices = stage_indices(pipeline.get_local_rank(), schedule)
    count = PIPELINE * len(indices)
    modules = {index: shard(Stage(index)) for index in indices}
    stages = [
        PipelineStage(m, index, count, torch.get_default_device(), group=pipeline.get_group())
        for index, m in modules.items()
    ]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in modules.values()]
    given: Any = stages[0] if len(stages) == 1 else stages
    runner = schedule(given, MICROBATCHES, loss_fn=lambda out, y: F.mse_loss(out.float(), y))
    losses: list[float] = []
    rows = 2 * MICROBATCHES
    for step in range(STEPS):
        x, y = batch(step, rows * data.size())
        mine = slice(rows * data.get_local_rank(), rows * (data.get_local_rank() + 1))
        inputs = (x[mine],) if 0 in modules else ()
        collected: list[Tensor] = []
        target: dict[str, Any] = {}
        if count - 1 in modules:
            target = {"target": y[mine], "losses": collected}
        runner.step(*inputs, **target)
        losses += map(float, collected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return modules, losses


def alone(count: int, rows: int) -> list[Stage]:
    """The same training in one process, on the whole batch at once."""
    stages = [Stage(index) for index in range(count)]
    model = nn.Sequential(*stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = batch(step, rows)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return stages


KEEPS: dict[str, Any] = {"reshard_after_forward": False}
FREES: dict[str, Any] = {"reshard_after_forward": True}
BF16: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), **KEEPS}
CASES = [
    *itertools.product((ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B), (KEEPS, FREES)),
    # Of parameters freed after forward, a backward in two parts finds none: torch's stage looks for
    # gradients of those registered when it begins, and with torch's engine too nothing is trained.
    (ScheduleInterleavedZeroBubble, KEEPS),
    (ScheduleZBVZeroBubble, KEEPS),
    (ScheduleLoopedBFS, BF16),
]


def mesh_of(size: int) -> DeviceMesh:
    return init_device_mesh(
        torch.get_default_device().type, (PIPELINE, size // PIPELINE), mesh_dim_names=("pp", "dp")
    )


@pytest.mark.sampled(4)
@ranks(2, 4)
@pytest.mark.parametrize(("schedule", "settings"), CASES)
def test_trains_as_with_torch_and_as_alone(
    rank: int, size: int, schedule: type[Any], settings: dict[str, Any]
) -> None:
    mesh = mesh_of(size)

    def shard_with(fully_shard: Any) -> Callable[[Stage], Stage]:
        return lambda stage: sharded(stage, mesh["dp"], fully_shard, **settings)

    ours, losses = train(schedule, mesh, shard_with(polyshard.fully_shard))
    torchs, expected = train(schedule, mesh, shard_with(torch_fsdp.fully_shard))
    assert losses == expected
    assert len(losses) == (STEPS * MICROBATCHES if PIPELINE * len(ours) - 1 in ours else 0)
    reference = alone(PIPELINE * len(ours), 2 * MICROBATCHES * mesh["dp"].size())
    for index, stage in ours.items():
        wholes = zip(torchs[index].parameters(), reference[index].parameters(), strict=True)
        for parameter, (other, single) in zip(stage.parameters(), wholes, strict=True):
            assert torch.equal(full(parameter.detach()), full(other.detach()))
            if "mp_policy" not in settings:
                torch.testing.assert_close(full(parameter.detach()), single.detach())
        assert all(group.is_sharded for group in groups_of(stage))


@ranks(4)
def test_a_group_is_reduced_once_a_step(rank: int, size: int) -> None:
    """However many micro-batches: their gradients add up before anything travels."""
    mesh, watching = mesh_of(size), Watching()

    def shard(stage: Stage) -> Stage:
        return sharded(stage, mesh["dp"], polyshard.fully_shard, plugins=[watching], **KEEPS)

    train(Schedule1F1B, mesh, shard)
    events = [event.split()[:2] for event in watching.watcher.events]
    for name in ("blocks.0", "blocks.1", "(root)"):
        assert events.count(["reduce", name]) == STEPS
    assert events.count(["step", "end"]) >= STEPS
    assert events[-1] == ["step", "end"]


@ranks(2)
def test_torch_does_not_shard_it_again(rank: int, size: int) -> None:
    model = polyshard.fully_shard(Stage(0))
    with pytest.raises(AssertionError, match="once"):
        torch_fsdp.fully_shard(model)
