"""A resize that fails on one rank costs no rank anything."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toy_meeting import await_all
from toy_runs import assert_equal, whole

import polyshard
import polyshard_resilience
from polyshard_resilience.errors import ResizeError
from polyshard_resilience.resizing.exchange import Exchange
from polyshard_testing import World, ranks
from polyshard_testing.world import RankError

PATIENT_SECONDS = 10.0


class Job:
    """A small run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        polyshard.fully_shard(self.model[0])
        polyshard.fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def backward(self) -> None:
        self.model(torch.ones(2, 6)).square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def resize(self, group: Any) -> None:
        polyshard_resilience.resize(self.model, self.optimizer, group)


def refusal(job: Job, group: Any, pattern: str) -> ResizeError:
    """What a resize raises that fails."""
    with pytest.raises(ResizeError, match=pattern) as caught:
        job.resize(group)
    return caught.value


@ranks(3)
def test_a_failure_of_one_rank_costs_nothing(rank: int, size: int) -> None:
    """Out of memory before rows move, or an error while they do: all have what they had."""
    polyshard_resilience.enable()
    job = Job()
    job.step()
    before, group = whole(job.model), dist.new_group([0, 1])
    plan = "polyshard.engine.resizing.ParameterGroup.take_memory"
    for target, error in (
        (plan, torch.OutOfMemoryError("out of memory")),
        ("polyshard_resilience.resizing.exchange.Exchange.move", ValueError("deliberate")),
    ):
        await_all("gathered", size)  # a failure would end that for a rank behind
        begin = time.monotonic()
        broken = mock.patch(target, side_effect=error) if rank == 1 else nullcontext()
        with broken:
            refused = refusal(job, group if rank < 2 else None, f"rank 1: {type(error).__name__}")
        assert refused.ranks == (1,)
        assert refused.is_out_of_memory == (target is plan)
        assert time.monotonic() - begin < PATIENT_SECONDS
        assert_equal(whole(job.model), before)
    job.step()  # the engine's wires, and process groups that had to be cut
    dist.barrier()
    job.resize(group if rank < 2 else None)
    if rank < 2:
        job.step()
    else:
        assert all(p.is_meta for p in job.model.parameters())
        with pytest.raises(polyshard.errors.LifecycleError, match="was closed"):
            job.backward()


def interrupted(rank: int, size: int) -> None:
    polyshard_resilience.enable()
    job = Job()
    job.step()
    begin = time.monotonic()
    if rank:
        move = mock.patch.object(Exchange, "move", side_effect=KeyboardInterrupt)
        with move, pytest.raises(KeyboardInterrupt):
            job.resize(dist.group.WORLD)
        time.sleep(PATIENT_SECONDS)  # a process that takes long to end
    else:
        assert refusal(job, dist.group.WORLD, "rank 1: KeyboardInterrupt").is_gone
        assert time.monotonic() - begin < PATIENT_SECONDS


def test_an_interrupted_resize_keeps_no_other_waiting() -> None:
    world = World(2)  # of its own: rank 1 has said that it leaves
    try:
        world.run(interrupted)
    finally:
        world.close()


@ranks(2)
def test_a_resize_between_micro_batches_that_failed(rank: int, size: int) -> None:
    """Where reductions are turned off still."""
    polyshard_resilience.enable()
    job = Job()
    job.step()
    job.model.set_requires_gradient_sync(requires_gradient_sync=False)
    job.resize(dist.group.WORLD)
    job.model.set_requires_gradient_sync(requires_gradient_sync=True)
    job.step()


@ranks(2)
def test_what_does_not_fit_is_refused_on_every_rank(rank: int, size: int) -> None:
    polyshard_resilience.enable()
    job = Job()
    job.step()
    world = dist.group.WORLD
    with pytest.raises(ResizeError, match="no one set of ranks is to hold it"):
        job.resize(None)
    job.backward()
    with pytest.raises(ResizeError, match="zero_grad"):
        job.resize(world)
    job.optimizer.zero_grad()
    if rank:
        job.optimizer.state[job.model[0].weight]["more"] = torch.ones(4, device="cpu")
    with pytest.raises(ResizeError, match=r"rank 1: .*'more' of '0.weight'"):
        job.resize(world)
    job.optimizer.state[job.model[0].weight].pop("more", None)
    job.resize(world)  # nothing moves
    job.step()


@ranks(4)
def test_what_does_not_follow_is_refused(rank: int, size: int) -> None:
    """Replicas, blocks of ranks, gradients that wait: by name."""
    polyshard_resilience.enable()
    replicas = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    settings: list[tuple[str, dict[str, Any]]] = [
        ("several axes", {"mesh": replicas}),
        ("into blocks", {"reshard_after_forward": 2}),
    ]
    for expected, given in settings:
        model = polyshard.fully_shard(nn.Linear(6, 5), **given)
        with pytest.raises(ResizeError, match=expected):
            polyshard_resilience.resize(model, (), dist.group.WORLD)
    job = Job()
    with job.model.no_sync():
        job.backward()
    with pytest.raises(ResizeError, match="has gradients"):
        job.resize(dist.group.WORLD)


def test_a_rank_dies() -> None:
    """The others keep what they have, and say so within seconds."""
    world = World(3)
    try:
        with pytest.raises(RankError) as caught:
            world.run(_dies)
    finally:
        world.close()
    assert str(caught.value).count("--- rank") == 1, str(caught.value)
    assert "--- rank 2 ---\nthe process ended without an answer" in str(caught.value)


def _dies(rank: int, size: int) -> None:
    polyshard_resilience.enable()
    job = Job()
    job.step()
    held = [p.to_local().clone() for p in job.model.parameters()]
    move = Exchange.move

    def dying(self: Exchange, tensors: Any) -> Any:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return move(self, tensors)

    group, begin = dist.new_group([0, 1]), time.monotonic()
    with mock.patch.object(Exchange, "move", dying):
        error = refusal(job, group, "rank 2 is gone.*save the remaining")
    assert error.is_gone
    assert time.monotonic() - begin < PATIENT_SECONDS
    for p, before in zip(job.model.parameters(), held, strict=True):
        assert torch.equal(p.to_local(), before)
