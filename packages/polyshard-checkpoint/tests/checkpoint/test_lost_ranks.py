"""What ranks raise that save with a rank that is gone, or does not come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from toy_meeting import await_all
from toy_runs import Job

from polyshard._torch.private import timeout_of
from polyshard.errors import CheckpointError
from polyshard_checkpoint import Checkpoints
from polyshard_checkpoint.safetensors import save_safetensors
from polyshard_checkpoint.together import Ranks
from polyshard_testing import World, ranks
from polyshard_testing.world import RankError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def hasty_world() -> Iterator[World]:
    """Two ranks that wait a second for each other."""
    world = World(2, collective_seconds=1.0)
    yield world
    world.close()


@pytest.fixture
def world() -> Iterator[World]:
    """Two ranks, of which one is to die."""
    world = World(2)
    yield world
    world.close()


@ranks(2)
def test_ranks_wait_as_long_as_in_the_group_of_the_job(rank: int, size: int) -> None:
    assert dist.group.WORLD is not None
    with Ranks() as every:
        assert every.group is not None
        assert timeout_of(every.group) == timeout_of(dist.group.WORLD)
        await_all("made", size)  # a rank that leaves earlier ends others, which still connect


def save_without_the_other(rank: int, size: int, folder: str) -> None:
    model = Job.start(rank, size).model
    await_all("sharded", size)
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"not all ranks took part: .*timeout"):
            save_safetensors(model, folder)


def test_a_rank_that_does_not_come(hasty_world: World, tmp_path: str) -> None:
    hasty_world.run(save_without_the_other, str(tmp_path))


def save_with_the_dead(rank: int, size: int, folder: str) -> None:
    job = Job.start(rank, size)
    checkpoints = Checkpoints(folder)

    def train() -> None:
        with checkpoints:
            checkpoints.save_async(1, job.state).wait()
            await_all("saved", size)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpoints.save_async(2, job.state)
            raise KeyError("what ended the run")

    with pytest.raises(KeyError, match="what ended the run"):
        train()
    with pytest.raises(CheckpointError, match="not all ranks took part"):
        checkpoints.save(3, job.state)
    with pytest.raises(CheckpointError, match="not all ranks took part"):
        checkpoints.load(job.state)  # not that the checkpoint is damaged


def test_a_rank_that_died_while_a_save_ran(world: World, tmp_path: str) -> None:
    with pytest.raises(RankError) as caught:
        world.run(save_with_the_dead, str(tmp_path))
    text = str(caught.value)
    assert text.count("--- rank") == 1, text
    assert "the process ended without an answer" in text
