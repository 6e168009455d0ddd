"""One verdict for all ranks, whichever fails and where."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from toy_attempts import failure, raising
from toy_meeting import await_all
from toy_models import build, loss_of, shard, tokens_for
from toy_runs import assert_equal, whole

import polyshard
import polyshard_resilience
from polyshard._torch.private import default_store
from polyshard.errors import PeerError
from polyshard_resilience.alarm.current import current_alarm
from polyshard_resilience.alarm.peers import tell_again
from polyshard_resilience.errors import AttemptError
from polyshard_resilience.rollback import verdict
from polyshard_testing import World, ranks
from polyshard_testing.world import RankError

PATIENT_SECONDS = 10.0
"""Far below the time-out of the process group (60 s), far above what it takes on a busy machine."""
LATE_SECONDS = 1.5
PLACES = ["forward", "backward", "before the step", "in the step", "after the step"]


class Job:
    """A small run, in which ``raises`` may be told to happen somewhere."""

    def __init__(self, rank: int, mesh: Any = None) -> None:
        self.rank = rank
        model = build(3, width=12, hidden=20, layers=2)
        self.model: Any = shard(model, polyshard.fully_shard, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.model.blocks[1].register_forward_hook(self._in_block)
        self.optimizer.register_step_post_hook(lambda *_: self._at("in the step"))
        self.place = ""
        self.raises: Callable[[], object] = raising(ValueError("deliberate"))

    def _at(self, place: str) -> None:
        if place == self.place:
            self.raises()

    def _in_block(self, module: object, args: object, output: Tensor) -> None:
        self._at("forward")
        if output.requires_grad:
            output.register_hook(lambda _: self._at("backward"))

    def backward(self, step: int = 0) -> None:
        loss_of(self.model, tokens_for(step, self.rank)).backward()

    def step(self, step: int = 0) -> None:
        self.backward(step)
        self._at("before the step")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._at("after the step")

    def attempted(self, **options: Any) -> Any:
        return polyshard_resilience.attempt(self.model, self.optimizer, **options)

    def train(self, steps: int, start: int = 0) -> dict[str, Tensor]:
        for step in range(start, start + steps):
            with self.attempted():
                self.step(step)
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        """All ranks have left the collectives, which a failure of one would end for others."""
        found = whole(self.model)
        await_all("weights", dist.get_world_size())
        return found


@ranks(3)
def test_a_failure_of_one_rank_undoes_all(rank: int, size: int) -> None:
    """Whichever rank fails, wherever: the run continues as if it had not been tried."""
    wanted = Job(rank).train(3)
    job = Job(rank)
    before = job.train(1)
    for index, place in enumerate(PLACES):
        failing = index % size
        job.place = place if rank == failing else ""
        begin = time.monotonic()
        said = rf"rank {failing}: ValueError: deliberate"
        error = failure(job.attempted(), lambda: job.step(1), said)
        assert time.monotonic() - begin < PATIENT_SECONDS, place
        assert error.ranks == (failing,)
        dist.barrier()  # the user's process group is as it was
        assert_equal(job.weights(), before)
    job.place = ""
    assert_equal(job.train(2, start=1), wanted)


@ranks(2)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_ranks_retry_together(rank: int, size: int, place: str) -> None:
    """Memory runs out on one rank, in the middle of a step that others wait in."""
    job, tried = Job(rank), []
    job.raises = raising(torch.OutOfMemoryError("CUDA out of memory"))
    for trial in polyshard_resilience.attempts(job.model, job.optimizer, sizes=(4, 2, 1)):
        with trial as micro:
            tried.append(micro)
            job.place = place if rank == 1 and micro > 1 else ""
            for part in tokens_for(0, rank).split(micro):
                loss_of(job.model, part).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    assert tried == [4, 2, 1]
    assert trial.succeeded
    wanted = Job(rank)
    for part in tokens_for(0, rank).split(1):
        loss_of(wanted.model, part).backward()
    wanted.optimizer.step()
    assert_equal(whole(job.model), whole(wanted.model))


class Slow:
    """Takes its time to go back, on one rank."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        time.sleep(self.seconds)


@ranks(2)
def test_a_rank_may_fail_again_while_others_still_go_back(rank: int, size: int) -> None:
    job, slow = Job(rank), Slow(0.0 if rank else 0.5)
    job.train(1)
    begin = time.monotonic()

    def late() -> None:
        time.sleep(0.3)
        job.step()

    body = raising(ValueError("at once")) if rank else late
    for _ in range(3):
        failure(job.attempted(also=[slow]), body, "rank 1: ValueError: at once")
    assert time.monotonic() - begin < PATIENT_SECONDS
    job.train(1)


@ranks(2)
def test_groups_that_cannot_be_mended_end_the_attempt_on_all(rank: int, size: int) -> None:
    """The rank that cannot repair them tells the others in the vote, and none waits for it."""
    job = Job(rank)
    job.train(1)
    before, begin = job.weights(), time.monotonic()
    refused = mock.Mock(side_effect=PeerError("rank 2 did not come to mend group 7"))
    with mock.patch.object(verdict, "mend_groups", refused if rank else mock.Mock()):
        error = failure(job.attempted(), raising(ValueError("first")), "rank 1: PeerError: rank 2")
    assert error.ranks == (1,)
    assert time.monotonic() - begin < PATIENT_SECONDS
    assert_equal(whole(job.model), before)
    job.train(1)


@ranks(2)
def test_a_failure_before_the_first_forward(rank: int, size: int) -> None:
    job = Job(rank)
    begin = time.monotonic()
    for _ in range(2):
        body = raising(ValueError("at once")) if rank else job.step
        # A rank that is half a second ahead quotes the failure before, which was the same.
        failure(job.attempted(), body, "rank 1( failed while planning)?: ValueError: at once")
    assert time.monotonic() - begin < PATIENT_SECONDS
    assert_equal(job.train(1), Job(rank).train(1))


@ranks(2)
def test_what_the_code_around_swallows_is_raised(rank: int, size: int) -> None:
    job = Job(rank)

    def body() -> None:
        job.backward()
        try:
            if rank == 0:
                raise KeyError("deliberate")
            job.optimizer.step()
        except AttemptError:
            pass

    failure(job.attempted(), body, "rank 0: KeyError")


@ranks(2)
def test_ready_comes_before_collectives(rank: int, size: int) -> None:
    job = Job(rank)
    step, reached = job.attempted(), []

    def body() -> None:
        job.backward()
        if rank == 0:
            raise KeyError("deliberate")
        step.ready()
        reached.append(True)

    failure(step, body, "rank 0: KeyError")
    assert not reached
    step = job.attempted()
    with step:
        job.backward()
        step.ready()
        polyshard.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()


@ranks(4)
def test_replicas_and_several_optimizers(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    job = Job(rank, mesh)
    parameters = list(job.model.parameters())
    two = [torch.optim.AdamW(parameters[:4]), torch.optim.SGD(parameters[4:], momentum=0.9, lr=0.1)]
    before = whole(job.model)

    def body() -> None:
        job.backward()
        two[0].step()
        if rank == 2:
            raise RuntimeError("between")
        two[1].step()

    failure(polyshard_resilience.attempt(job.model, two), body, "rank 2: RuntimeError: between")
    assert_equal(whole(job.model), before)
    assert not any(optimizer.state for optimizer in two)


@ranks(2)
def test_all_ranks_must_have_as_many_sizes(rank: int, size: int) -> None:
    job = Job(rank)
    sizes = (4, 2) if rank == 0 else (4,)
    trial = next(polyshard_resilience.attempts(job.model, job.optimizer, sizes))
    failure(trial, raising(MemoryError()), "MemoryError.*different numbers of sizes")


@ranks(2)
def test_the_store_does_not_grow(rank: int, size: int) -> None:
    store: Any = default_store()
    job = Job(rank)

    def steps(count: int) -> int:
        for step in range(count):
            with job.attempted():
                job.step(step)
        dist.barrier()
        return int(store.num_keys())

    before = steps(3)
    assert steps(6) <= before + 2, "of the last attempt"


def waits_elsewhere(rank: int, size: int) -> None:
    job = Job(rank)
    before = job.train(1)

    def body() -> None:
        job.backward(1)
        if rank == 0:
            raise KeyError("deliberate")
        dist.barrier()

    begin = time.monotonic()
    failure(job.attempted(), body, "rank 0: KeyError: 'deliberate'")
    assert time.monotonic() - begin < PATIENT_SECONDS
    own = [p.to_local() for p in job.model.parameters()]
    parts = [value.chunk(size) for value in before.values()]
    assert all(torch.equal(o, p[rank]) for o, p in zip(own, parts, strict=True) if len(p) > rank)
    with job.attempted():  # connections are made anew, those of the process group too
        dist.barrier()
        job.step(1)


def tells_late(rank: int, size: int) -> None:
    """A rank that tells of its failure again does so when others could have gone on already."""

    def slowly(error: BaseException) -> None:
        current_alarm().begin_anew()
        time.sleep(LATE_SECONDS)
        tell_again(error)

    vars(verdict)["tell_again"] = slowly
    waits_elsewhere(rank, size)


@pytest.mark.parametrize("work", [waits_elsewhere, tells_late])
def test_a_rank_that_waits_elsewhere(work: Callable[[int, int], None]) -> None:
    world = World(2)  # with few process groups to repair
    try:
        world.run(work)
    finally:
        world.close()


def one_rank_dies(rank: int, size: int, place: str) -> None:
    """The last rank kills itself in the third step."""
    job = Job(rank)
    before = job.train(2)
    if rank == size - 1:
        job.place, job.raises = place, lambda: os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    error = failure(job.attempted(), lambda: job.step(2), "rank 2 is gone.*Save the remaining")
    assert time.monotonic() - begin < PATIENT_SECONDS
    assert error.is_gone
    assert error.is_undone
    assert job.optimizer.state[next(job.model.parameters())]["step"] == 2
    for name, value in job.model.state_dict().items():
        mine = before[name].chunk(size)
        local = value.to_local()
        assert torch.equal(local, mine[rank] if rank < len(mine) else local), name
    begin = time.monotonic()
    error = failure(job.attempted(), lambda: job.step(2), "rank 2 is gone")
    assert error.is_gone
    assert time.monotonic() - begin < PATIENT_SECONDS


@pytest.mark.parametrize("place", ["forward", "before the step", "in the step"])
def test_a_rank_that_dies(place: str) -> None:
    world = World(3)
    try:
        with pytest.raises(RankError) as caught:
            world.run(one_rank_dies, place)
    finally:
        world.close()
    assert str(caught.value).count("--- rank") == 1, str(caught.value)
    assert "--- rank 2 ---\nthe process ended without an answer" in str(caught.value)


@ranks(2)
def test_a_rank_may_fail_before_another_has_begun_the_attempt(rank: int, size: int) -> None:
    """Gradients of the step before are there still; no device has anything to do with them."""
    job = Job(rank)
    with polyshard_resilience.attempt(job.model, job.optimizer):
        job.backward()
        job.optimizer.step()
    if rank == 0:
        while current_alarm().report is None:
            time.sleep(0.01)
    body = raising(ValueError("early")) if rank else job.backward
    failure(polyshard_resilience.attempt(job.model, job.optimizer), body, "rank 1: ValueError")
    with polyshard_resilience.attempt(job.model, job.optimizer):
        job.backward()
        job.optimizer.step()
