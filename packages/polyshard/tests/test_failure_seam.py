"""Core alone leaves failures to torch's time-outs; a handler comes before anything is sharded."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import polyshard
from polyshard import failures
from polyshard.errors import PlanMismatchError
from polyshard_testing import ranks

SECONDS = 6.0
"""Of a process group: to connect, and for every transfer."""


def core_alone() -> Any:
    """As where no handler was installed."""
    handler = failures.FailureHandler()
    return mock.patch.object(failures._registry(), "current", return_value=handler)


def model_of(seed: int, mesh: DeviceMesh | None = None) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    for unit in (model[0], model[2], model):
        polyshard.fully_shard(unit, mesh=mesh)
    return model


def trained(rank: int) -> list[Tensor]:
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        for part in torch.randn(2, 4, 6):
            model(part).square().mean().backward()
        polyshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() for p in model.parameters()]


@ranks(2)
def test_training_is_the_same_without_a_handler(rank: int, size: int) -> None:
    with core_alone():
        alone = trained(rank)
    assert all(map(torch.equal, alone, trained(rank)))


@ranks(2)
def test_a_rank_that_fails_leaves_its_peers_to_the_time_out(rank: int, size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    with core_alone():
        model = model_of(0, DeviceMesh.from_group(group, "cpu"))
        batch = torch.randn(4, 6)
        model(batch).sum().backward()
        begin = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out|closed"):
                model(batch)
            assert time.monotonic() - begin > SECONDS / 2
    dist.barrier()


@ranks(2)
def test_ranks_with_and_without_a_handler_are_told_apart(rank: int, size: int) -> None:
    with core_alone() if rank else nullcontext():
        model = model_of(0)
        with pytest.raises(PlanMismatchError, match=r"left to torch's time-outs") as refused:
            model(torch.randn(4, 6))
    assert "left to polyshard-resilience" in str(refused.value)


def test_a_handler_comes_before_anything_is_sharded() -> None:
    """Groups keep the handler that there was; a late one is refused with what to do."""
    script = """
import torch, polyshard, polyshard_resilience
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
polyshard.fully_shard(torch.nn.Linear(2, 2))
polyshard_resilience.enable()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "LifecycleError" in done.stderr
    assert "Call polyshard_resilience.enable() on every rank before fully_shard" in done.stderr
