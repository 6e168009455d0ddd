"""Ranks of an attempt that wait are told soon of each failure, and of the right rank."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from toy_attempts import failure, raising
from toy_meeting import await_all
from toy_models import build, loss_of, shard, tokens_for
from toy_runs import assert_equal, whole

import polyshard
import polyshard_resilience
from polyshard._torch.private import default_store
from polyshard_resilience.errors import AttemptError
from polyshard_testing import World
from polyshard_testing.world import RankError

PATIENT_SECONDS = 12.0
"""Far below the time-out of the process group (60 s), far above what it takes on a busy machine."""
DEAD = "the process ended without an answer"


class Job:
    """A small run."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model: Any = shard(build(3, width=12, hidden=20, layers=2), polyshard.fully_shard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def attempted(self) -> Any:
        return polyshard_resilience.attempt(self.model, self.optimizer)

    def step(self, step: int = 0, *, backward: bool = True) -> None:
        loss = loss_of(self.model, tokens_for(step, self.rank))
        if backward:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int) -> None:
        for step in range(steps):
            with self.attempted():
                self.step(step)


def run(size: int, work: Callable[..., None], *args: object, dead: int = 0) -> None:
    """``work`` on ranks of their own, ``dead`` of which end."""
    world = World(size)
    try:
        if not dead:
            world.run(work, *args)
            return
        with pytest.raises(RankError) as caught:
            world.run(work, *args)
    finally:
        world.close()
    assert str(caught.value).count("--- rank") == str(caught.value).count(DEAD) == dead, (
        caught.value
    )


def dies_while_others_are_elsewhere(rank: int, size: int) -> None:
    job = Job(rank)
    job.train(1)
    begin = time.monotonic()

    def body() -> None:
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    error = failure(job.attempted(), body, f"rank {size - 1} is gone.*Save the remaining state")
    assert error.is_gone
    assert error.ranks == (size - 1,)
    job.model.reset_iter_state()
    assert time.monotonic() - begin < PATIENT_SECONDS


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_dies_while_others_are_in_a_collective_of_their_own(size: int) -> None:
    run(size, dies_while_others_are_elsewhere, dead=1)


def stopped_while_others_are_elsewhere(rank: int, size: int, told: str) -> None:
    """The last rank is stopped, and killed once the others have been told."""
    job = Job(rank)
    job.train(1)
    begin = time.monotonic()

    def body() -> None:
        if rank == size - 1:
            script = f"until [ -e {told} ]; do sleep 0.1; done; kill -KILL {os.getpid()}"
            subprocess.Popen(["/bin/sh", "-c", script])
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    error = failure(job.attempted(), body, f"rank {size - 1} was stopped.*kill -CONT")
    assert time.monotonic() - begin < PATIENT_SECONDS
    assert error.ranks == (size - 1,)
    assert not error.is_gone
    if rank == 0:
        Path(told).touch()


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_stops_while_others_are_in_a_collective_of_their_own(
    size: int, tmp_path: Path
) -> None:
    run(size, stopped_while_others_are_elsewhere, str(tmp_path / "told"), dead=1)


def skips_backward(rank: int, size: int) -> None:
    job = Job(rank)
    job.train(1)
    before = whole(job.model)
    begin = time.monotonic()
    error = failure(
        job.attempted(),
        lambda: job.step(1, backward=rank != 1),
        "control flow differs between ranks, which wait for each other: .*rank 1 is at the vote",
    )
    assert time.monotonic() - begin < PATIENT_SECONDS
    assert error.ranks == ()
    assert_equal(whole(job.model), before)
    job.train(1)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_skips_a_backward(size: int) -> None:
    run(size, skips_backward)


def evaluates_alone(rank: int, size: int) -> None:
    """A rank that has come to the end of an attempt waits there like in a transfer."""
    job = Job(rank)
    job.train(1)
    begin = time.monotonic()

    def body() -> None:
        job.step(1)
        if rank == 1:
            loss_of(job.model, tokens_for(2, rank))

    failure(job.attempted(), body, "control flow differs between ranks")
    assert time.monotonic() - begin < PATIENT_SECONDS
    job.train(1)


def test_one_more_evaluation_inside_of_an_attempt() -> None:
    run(2, evaluates_alone)


def leaves(rank: int, size: int, kind: type[BaseException]) -> None:
    job = Job(rank)
    job.train(1)
    begin = time.monotonic()
    if rank == 1:
        with pytest.raises(kind), job.attempted():
            raise kind("now")
        return
    said = f"rank 1: {kind.__name__}: now, with which it leaves.*Save the remaining state"
    error = failure(job.attempted(), lambda: job.step(1), said)
    assert error.is_gone
    assert error.ranks == (1,)
    assert time.monotonic() - begin < PATIENT_SECONDS


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_rank_that_leaves(kind: type[BaseException]) -> None:
    run(2, leaves, kind)


def fails_often(rank: int, size: int) -> None:
    store: Any = default_store()
    job = Job(rank)
    job.train(1)

    def fail(times: int) -> int:
        for _ in range(times):
            body = raising(ValueError("deliberate")) if rank else job.step
            failure(job.attempted(), body, "rank 1: ValueError")
        dist.barrier()
        await_all("failed", size)
        return int(store.num_keys())

    before = fail(24)
    await_all("failed", size)
    assert fail(8) <= before + 2


def test_failures_do_not_fill_the_store() -> None:
    """It keeps those of the last 16 epochs."""
    run(2, fails_often)


def cut_often(rank: int, size: int) -> None:
    job = Job(rank)
    job.train(1)

    def cut() -> tuple[int, int]:
        body = raising(ValueError("deliberate")) if rank else dist.barrier
        failure(job.attempted(), body, "rank 1: ValueError")
        dist.barrier()
        await_all("connected", size)  # a failure now would end the barrier for a rank behind
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    cut()
    first, last = cut(), [cut() for _ in range(3)][-1]
    assert last[0] <= first[0] + 1, "files"
    assert last[1] <= first[1] + 3 * 2 + 1, "threads"


def test_groups_that_are_mended_take_no_more_files() -> None:
    """Two threads each time stay, which gloo keeps for the group's earlier connections."""
    run(2, cut_often)


def busy_in_c(rank: int, size: int) -> None:
    """A long call into C keeps the alarm's thread from looking until its report is no more."""
    polyshard_resilience.enable()
    job = Job(rank)
    job.train(1)

    def body() -> None:
        if rank:
            raise ValueError("on its own")
        ctypes.PyDLL(None).usleep(4_000_000)  # holds the interpreter lock
        dist.barrier()

    begin = time.monotonic()
    assert failure(job.attempted(), body, "rank 1: ValueError").ranks == (1,)
    assert time.monotonic() - begin < PATIENT_SECONDS
    job.train(1)


def test_a_rank_that_hears_late_hears() -> None:
    run(2, busy_in_c)


class FailsOnce:
    """Something of a user's that cannot be put back the first time."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            self.fails = False
            raise MemoryError("no room for a copy")


def going_back_fails(rank: int, size: int) -> None:
    polyshard_resilience.enable()
    job = Job(rank)
    job.train(1)
    begin, also = time.monotonic(), FailsOnce(fails=rank == 1)
    trials = 0

    def try_sizes() -> None:
        nonlocal trials
        sizes = polyshard_resilience.attempts(job.model, job.optimizer, also=[also], sizes=(2, 1))
        for trial in sizes:
            with trial:
                trials += 1
                raise torch.OutOfMemoryError("of the device")

    with pytest.raises((AttemptError, MemoryError)) as caught:
        try_sizes()
    assert trials == 1, "the other rank tries no smaller size with it"
    assert isinstance(caught.value, MemoryError if rank else AttemptError)
    assert "no room for a copy" in str(caught.value)
    assert time.monotonic() - begin < PATIENT_SECONDS


def test_a_rank_that_cannot_go_back_keeps_no_other_waiting() -> None:
    run(2, going_back_fails)
