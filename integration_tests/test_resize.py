"""Resizing with plugins and optimizers of other distributions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from toy_runs import assert_equal, whole

import polyshard
import polyshard_resilience
from polyshard_offload import Offload
from polyshard_optimizers import MatrixOptimizer, flat
from polyshard_quantized import ErrorFeedback, Int8Block, QuantizedComm
from polyshard_reproducible import Reproducible
from polyshard_resilience.errors import ResizeError
from polyshard_testing import ranks

if torch.get_default_device().type != "cpu":  # a rank of `pytest --device`
    torch.use_deterministic_algorithms(True)


def mesh_of(members: list[int]) -> DeviceMesh:
    return DeviceMesh(torch.get_default_device().type, members)


class Job:
    """A run on the ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh, *plugins: Any) -> None:
        polyshard_resilience.enable()
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 3))
        polyshard.fully_shard(self.model[0], mesh=mesh, plugins=plugins)
        polyshard.fully_shard(self.model, mesh=mesh, plugins=plugins)
        adam = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = flat(adam)

    def backward(self, slot: int) -> None:
        generator = torch.Generator("cpu").manual_seed(slot)
        x = torch.randn(4, 9, generator=generator, device="cpu")
        self.model(x).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.backward(10 * step + dist.get_rank())
            self.step()

    def resize(self, group: Any) -> polyshard_resilience.Resized:
        return polyshard_resilience.resize(self.model, self.optimizer, group)

    def slots(self, plugin: Reproducible, step: int) -> None:
        for slot in plugin.each_slot(self.model, step=step):
            self.backward(10 * step + slot)
        self.step()


@ranks(4)
def test_reproducible_runs_do_not_show_it(rank: int, size: int) -> None:
    """Bitwise a run that was never resized."""
    plugins = [Reproducible(slots=4) for _ in range(2)]
    job, members = Job(mesh_of([0, 1, 2, 3]), plugins[0]), [0, 1, 2, 3]
    for step, target in enumerate(([1, 2], [2], [0, 1, 2, 3], [0, 1, 2, 3])):
        if rank in members:
            job.slots(plugins[0], step)
        group = dist.new_group(target)
        job.resize(group)
        members = target
    mesh = mesh_of([0, 1])
    told: list[Any] = [None]
    if rank < 2:
        steady = Job(mesh, plugins[1])
        for step in range(4):
            steady.slots(plugins[1], step)
        told = [whole(steady.model)]
    dist.broadcast_object_list(told)
    assert_equal(whole(job.model), told[0])


@ranks(3)
@pytest.mark.parametrize("plugin", ["quantized", "offload"])
def test_with_plugins(rank: int, size: int, plugin: str) -> None:
    """What they keep of the weights follows; error feedback begins anew, which is noted."""
    made: Any = Offload.cpu()
    if plugin == "quantized":
        made = QuantizedComm(gradients=Int8Block(), error_feedback=ErrorFeedback())
    job = Job(mesh_of([0, 1, 2]), made)
    job.train(1)
    before = whole(job.model)
    resized = job.resize(dist.new_group([0, 2]))
    assert bool(resized.notes) == (plugin == "quantized")
    if rank != 1:
        assert_equal(whole(job.model), before)
        job.train(1)
    job.resize(dist.group.WORLD)
    job.train(1)


@ranks(2)
def test_optimizers_with_state_elsewhere_are_refused(rank: int, size: int) -> None:
    mesh = mesh_of([0, 1])
    muon = MatrixOptimizer(torch.optim.Muon)
    job = Job(mesh, muon)
    with pytest.raises(ResizeError, match="gradients land on owners"):
        job.resize(dist.group.WORLD)
    offload = Offload(optimizer="host")
    job = Job(mesh, offload)
    wrapped = offload.wrap(torch.optim.AdamW(job.model.parameters()))
    with pytest.raises(ResizeError, match="state outside of"):
        polyshard_resilience.resize(job.model, wrapped, dist.group.WORLD)
