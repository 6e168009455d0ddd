"""Saves that continue while training does."""

from __future__ import annotations

import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_models import build
from toy_runs import Job, assert_equal, whole

from polyshard.errors import CheckpointError
from polyshard_checkpoint import Checkpoints, Progress, TrainingState
from polyshard_checkpoint.checkpoints import Staging
from polyshard_testing import ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@ranks(2)
def test_training_goes_on_before_anything_is_written(rank: int, size: int, tmp_path: Path) -> None:
    job, may_write = Job.start(rank, size), threading.Event()
    job.train(1)
    before = whole(job.model)

    def held(progress: Progress) -> None:
        assert may_write.wait(20)

    with Checkpoints(tmp_path, progress=held) as checkpoints:
        saving = checkpoints.save_async(1, job.state)
        job.train(2)
        assert not saving.done()
        may_write.set()
        saving.wait()
    other = Job.start(rank, size, seed=1)
    Checkpoints(tmp_path).load(other.state)
    assert_equal(whole(other.model), before)


@ranks(2)
def test_progress_reaches_the_total(rank: int, size: int, tmp_path: Path) -> None:
    seen: list[Progress] = []
    job = Job.start(rank, size)
    job.train(1)
    Checkpoints(tmp_path, progress=seen.append).save(1, job.state)
    shards = sum(p.to_local().nbytes for p in job.model.parameters())  # type: ignore[attr-defined]
    assert [p.written for p in seen] == sorted(p.written for p in seen)
    assert seen[-1].total >= 3 * shards, "weights and both moments"
    assert seen[-1].written >= 3 * shards


def test_memory_is_used_again() -> None:
    staging, tree = Staging(), {"a": {"b": torch.arange(5.0)}, "c": 3}
    first, arrived = staging.copy(tree)
    arrived()
    address = first["a"]["b"].data_ptr()
    tree["a"]["b"] += 1  # type: ignore[index]
    assert first["a"]["b"].tolist() == [0, 1, 2, 3, 4]
    second, _ = staging.copy(tree)
    assert second["a"]["b"].data_ptr() == address
    assert second == {"a": {"b": second["a"]["b"]}, "c": 3}
    assert second["a"]["b"].tolist() == [1, 2, 3, 4, 5]


Pair = namedtuple("Pair", "a b")


def test_nothing_shares_memory_with_what_is_copied() -> None:
    base = torch.arange(4.0)
    tree: dict[str, Any] = {
        "keys": {1: torch.ones(2), "1": torch.zeros(2)},
        "pair": Pair(torch.ones(2), 3),
        "expanded": base[:1].expand(3),
        "strided": base[::2],
    }
    found, _ = Staging().copy(tree)
    for tensor in (*tree["keys"].values(), tree["pair"].a, base):
        tensor.fill_(9)
    assert [t.tolist() for t in found["keys"].values()] == [[1, 1], [0, 0]]
    assert found["pair"].a.tolist() == [1, 1]
    assert found["expanded"].tolist() == [0, 0, 0]
    assert found["strided"].tolist() == [0, 2]


@ranks(2)
def test_a_failed_save_is_said_once_and_to_all(rank: int, size: int, tmp_path: Path) -> None:
    job = Job.start(rank, size)
    job.train(1)

    def fail(progress: Progress) -> None:
        if rank == 1:
            raise OSError("No space left on device")

    checkpoints = Checkpoints(tmp_path, progress=fail)
    checkpoints.save_async(1, job.state)
    with pytest.raises(CheckpointError, match=r"step 1 .*No space left"):
        checkpoints.save(2, job.state)
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left"):
        checkpoints.save(2, job.state)
    assert Checkpoints(tmp_path).load(job.state) is None
    assert not list(tmp_path.glob(".unfinished*"))


@ranks(2)
def test_a_failed_save_that_was_handled_is_over(rank: int, size: int, tmp_path: Path) -> None:
    """Training continues after it, and the next save is one."""
    job = Job.start(rank, size)
    job.train(1)
    disk_is_full = True

    def write(progress: Progress) -> None:
        if disk_is_full and rank == 1:
            raise OSError("No space left on device")

    with Checkpoints(tmp_path, progress=write) as checkpoints:
        saving = checkpoints.save_async(1, job.state)
        with pytest.raises(CheckpointError, match="No space left"):
            saving.wait()
        disk_is_full = False
        assert checkpoints.save(2, job.state).is_dir()
        with pytest.raises(CheckpointError, match="No space left"):
            saving.wait()  # asked again, it says the same
    assert Checkpoints(tmp_path).load(job.state).step == 2  # type: ignore[union-attr]


def test_leaving_the_block_waits(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        saving = checkpoints.save_async(1, TrainingState(build()))
    assert saving.done()
    assert Checkpoints(tmp_path).load(TrainingState(build(1))) is not None


def test_an_exception_in_the_block_is_what_is_raised(tmp_path: Path) -> None:
    def fail(progress: Progress) -> None:
        raise OSError("disk")

    checkpoints: Any = Checkpoints(tmp_path, progress=fail)

    def train() -> None:
        with checkpoints:
            checkpoints.save_async(1, TrainingState(build()))
            raise KeyError("training")

    with pytest.raises(KeyError, match="training"):
        train()
