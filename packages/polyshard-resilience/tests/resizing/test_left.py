"""A rank that left the model by ``resize()`` is no other rank's concern."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy_runs import assert_equal, whole

import polyshard
import polyshard_resilience
from polyshard.errors import PeerError
from polyshard_resilience.alarm.current import _current, current_alarm
from polyshard_testing import World, ranks
from polyshard_testing.world import RankError

LEFT = 2
HOLDERS = [0, 1]
PATIENT_SECONDS = 60.0


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("deliberate")


class Layer(nn.Linear):
    """Whose backward fails if told so."""

    fails = False

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        return _Fails.apply(value) if self.fails else value  # type: ignore[no-untyped-call]


class Job:
    """A small run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(6, 5), Layer(5, 5), nn.Linear(5, 3))
        polyshard.fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.ones(2, 6)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def resize(self, group: Any) -> None:
        polyshard_resilience.resize(self.model, self.optimizer, group)


def left_by_one(rank: int) -> tuple[Job, Any]:
    """A run on two ranks, and their group, after the third has ended."""
    polyshard_resilience.enable()
    job = Job()
    job.step()
    group = dist.new_group(HOLDERS)
    job.resize(group if rank != LEFT else None)
    if rank == LEFT:
        end = _current()._end
        assert end is not None
        end._exit()  # as at the end of the interpreter
        os._exit(0)
    register, deadline = current_alarm().register, time.monotonic() + PATIENT_SECONDS
    while not register.ended({LEFT}):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.step()
    return job, group


def failing(rank: int, size: int) -> None:
    job, _ = left_by_one(rank)
    before = whole(job.model)
    job.model[1].fails = rank == 0
    if rank == 0:
        with pytest.raises(ValueError, match="deliberate") as caught:
            job.step()
        assert not getattr(caught.value, "__notes__", [])
    else:
        with pytest.raises(PeerError, match="because rank 0 failed in its backward"):
            job.step()
    job.model[1].fails = False
    job.model.reset_iter_state()
    job.optimizer.zero_grad()
    assert_equal(whole(job.model), before)
    job.step()


def cut(rank: int, size: int) -> None:
    """Rank 1 is in a collective of its own when the step is lost, and cuts all of its groups."""
    job, group = left_by_one(rank)
    job.model[1].fails = rank == 0
    if rank == 0:
        with pytest.raises(ValueError, match="deliberate"):
            job.step()
    else:
        job.model(torch.ones(2, 6))
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
    job.model[1].fails = False
    job.model.reset_iter_state()
    job.optimizer.zero_grad()
    job.step()
    both = torch.ones(1)
    dist.all_reduce(both, group=group)
    assert both.item() == len(HOLDERS)


@pytest.mark.parametrize("run", [failing, cut])
def test_a_rank_that_left_is_not_to_blame(run: Any) -> None:
    world = World(3)
    try:
        with pytest.raises(RankError) as caught:
            world.run(run)
    finally:
        world.close()
    text = str(caught.value)
    assert text.count("--- rank") == 1, text
    assert f"--- rank {LEFT} ---\nthe process ended without an answer" in text


@ranks(3)
def test_a_rank_that_joins_again_is_looked_at(rank: int, size: int) -> None:
    polyshard_resilience.enable()
    job, alarm = Job(), current_alarm()
    group = dist.new_group(HOLDERS)
    job.resize(group if rank != LEFT else None)
    assert alarm.away == {LEFT}
    assert alarm.expected(range(size)) == HOLDERS
    job.resize(dist.group.WORLD)
    assert not alarm.away
    job.resize(group if rank != LEFT else None)
    Job().step()  # another model, which it holds
    assert not alarm.away
