"""Groups that cannot be connected anew, with a toy in the place of NCCL, which has run nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from toy_attempts import failure, raising
from toy_meeting import await_all

import polyshard
import polyshard_resilience
from polyshard.errors import OutOfStepError, PeerError
from polyshard_testing import World


class Counting(dist.ProcessGroup):
    """A backend that only counts its collectives."""

    begun = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.begun


def counting_group() -> Any:
    make: Any = Counting  # the stubs know of the constructor with a store alone
    dist.Backend.register_backend(
        "counting", lambda store, rank, size, timeout: make(rank, size), devices=["cpu"]
    )
    return dist.new_group(backend="counting")


def retries(rank: int, size: int, apart: bool) -> None:
    """Rank 1 fails when it has begun two collectives fewer than rank 0, or as many."""
    group = counting_group()
    model: Any = polyshard.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        group.begun += 6
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    with polyshard_resilience.attempt(model, optimizer):
        step()
    group.begun += 4 if rank and apart else 6
    body = raising(ValueError("deliberate")) if rank else step
    if rank == 0:
        group.begun -= 6
    error = failure(polyshard_resilience.attempt(model, optimizer), body, "a step failed")
    assert error.is_gone == apart
    assert ("different numbers of collectives" in str(error)) == apart
    assert ("continue, with another batch" in str(error)) != apart
    if not apart:
        with polyshard_resilience.attempt(model, optimizer):
            step()


def resets(rank: int, size: int, apart: bool) -> None:
    group = counting_group()
    model: Any = polyshard.fully_shard(nn.Sequential(nn.Linear(4, 4)))
    x = torch.ones(1, 4)
    model(x).sum().backward()
    await_all("stepped", size)  # a failure in the next step would end this one for a rank behind
    group.begun = 4 if rank and apart else 6
    if rank:
        hook = model[0].register_forward_hook(raising(ValueError("now")))
    with pytest.raises(ValueError if rank else PeerError, match="now"):
        model(x).sum().backward()
    if rank:
        hook.remove()
    dist.barrier()
    if apart:
        with pytest.raises(OutOfStepError, match=r"1/0/.*from the last checkpoint"):
            model.reset_iter_state()
    else:
        model.reset_iter_state()
        model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("work", [retries, resets])
def test_ranks_out_of_step_do_not_go_on(work: Callable[..., None], apart: bool) -> None:
    world = World(2)
    try:
        world.run(work, apart)
    finally:
        world.close()
