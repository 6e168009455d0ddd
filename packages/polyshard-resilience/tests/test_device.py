"""Failures on a device: ranks that wait for it are told, and the next step's bits are right."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from toy_attempts import failure, raising
from toy_meeting import await_all
from toy_models import Branches, build, loss_of, shard, tokens_for

import polyshard
import polyshard_resilience
import polyshard_resilience.device
from polyshard.errors import ControlFlowError, PeerError
from polyshard_resilience.alarm.current import current_alarm
from polyshard_resilience.errors import AttemptError
from polyshard_resilience.rollback import verdict
from polyshard_testing import World

PATIENT_SECONDS = 12.0
"""Far below the time-out of the process group (60 s), far above what it takes on a busy machine."""
LARGE_BYTES = 64 << 20
CAPACITY_BYTES = 2 * LARGE_BYTES


def device() -> str:
    """Where the rank that asks computes."""
    return "sim" if hasattr(torch, "sim") else "cuda"


class Job:
    """A small run on the device."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        model = build(3, width=12, hidden=20, layers=2).to(device())
        mesh = init_device_mesh(device(), (dist.get_world_size(),))
        self.model: Any = shard(model, polyshard.fully_shard, mesh=mesh)
        self.shards: list[Any] = list(self.model.parameters())  # not what a lost step gathered
        self.optimizer = torch.optim.AdamW(self.shards, lr=1e-2)

    def attempted(self) -> Any:
        return polyshard_resilience.attempt(self.model, self.optimizer)

    def loss(self, step: int) -> torch.Tensor:
        return loss_of(self.model, tokens_for(step, self.rank).to(device()))

    def step(self, step: int) -> float:
        loss = self.loss(step)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().to_local().cpu() for p in self.shards]

    def recovers(self, undisturbed: list[float]) -> None:
        """Two more steps are what they are without a failure."""
        self.model.reset_iter_state()
        self.optimizer.zero_grad()
        assert [self.step(1), self.step(2)] == undisturbed


def undisturbed(rank: int) -> list[float]:
    job = Job(rank)
    return [job.step(step) for step in range(3)][1:]


def told(block: Callable[[], object], *words: str) -> float:
    """Seconds until ``block`` raises on a rank that did not fail; with these words."""
    begin = time.monotonic()
    with pytest.raises(PeerError) as caught:
        block()
    for each in words:
        assert each in str(caught.value)
    seconds = time.monotonic() - begin
    assert seconds < PATIENT_SECONDS
    return seconds


def broken(job: Job, error: Exception) -> None:
    """A forward that raises in its second layer, when the first is under way."""
    hook = job.model.blocks[1].register_forward_pre_hook(raising(error))
    with pytest.raises(type(error)):
        job.step(1)
    hook.remove()


def in_a_step(rank: int, size: int) -> None:
    expected, job = undisturbed(rank), Job(rank)
    job.step(0)
    before = job.weights()
    await_all("stepped", size)
    if rank == size - 1:
        broken(job, ValueError("deliberate"))
    else:
        told(lambda: job.step(1), f"rank {size - 1} failed in the forward", "deliberate")
    assert all(map(torch.equal, before, job.weights()))
    job.recovers(expected)


def while_synchronizing(rank: int, size: int) -> None:
    """The host is held by the device, in an evaluation that no call of the engine follows."""
    expected, job = undisturbed(rank), Job(rank)
    job.step(0)
    if rank == size - 1:
        await_all("launched", size)
        broken(job, ValueError("deliberate"))
    else:
        with torch.no_grad():
            loss = job.loss(1)
        await_all("launched", size)  # no rank learns of it while this is launched
        begin = time.monotonic()
        for wait in (loss.item, torch.accelerator.synchronize):
            wait()  # of no value, but it ends
        assert time.monotonic() - begin < PATIENT_SECONDS
        told(lambda: job.step(1), f"rank {size - 1} failed in the forward", "deliberate")
    job.recovers(expected)


def in_a_collective_of_their_own(rank: int, size: int) -> None:
    job = Job(rank)
    expected = undisturbed(rank)
    job.step(0)

    def clips() -> None:
        job.loss(1).backward()
        if rank == size - 1:
            raise ValueError("deliberate")
        norm = torch.ones(2, device=device())
        dist.all_reduce(norm)
        job.optimizer.step()  # by values that may be wrong, which is undone
        norm.tolist()

    error = failure(job.attempted(), clips, f"rank {size - 1}: ValueError: deliberate")
    assert error.ranks == (size - 1,)
    job.recovers(expected)


def in_another_order(rank: int, size: int) -> None:
    """Layers of one size mix their data on a device, and nothing hangs."""
    expected, job = undisturbed(rank), Job(rank)
    job.step(0)
    before = job.weights()
    blocks = job.model.blocks._modules
    if rank == 1:
        job.model.blocks._modules = dict(zip(blocks, reversed(blocks.values()), strict=True))
    with pytest.raises(ControlFlowError, match="rank 0 is at the end of a backward"):
        job.step(1)
    job.model.blocks._modules = blocks
    assert all(map(torch.equal, before, job.weights()))
    job.recovers(expected)


def with_other_gradients(rank: int, size: int) -> None:
    """Sums of different parameters would mix on a device, where they have one size."""
    mesh = init_device_mesh(device(), (size,))
    model: Any = polyshard.fully_shard(Branches(8).to(device()), mesh=mesh)
    x = torch.tensor(1.0 + rank, device=device())

    def backward(uses: str) -> None:
        model(x, uses).backward()

    backward("abc")
    with pytest.raises(ControlFlowError) as caught:
        backward("ac" if rank == 1 else "ab")
    for words in ("rank 0 is at", "without gradients of 'c'", "rank 1 is at", "of 'b'"):
        assert words in str(caught.value)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.reset_iter_state()
    for uses in ("ab", "abc"):  # what no rank uses is no difference
        model.zero_grad()
        backward(uses)
        mean = torch.full((8, 8), sum(1.0 + r for r in range(size)) / size, device=device())
        for name in uses:
            assert torch.equal(getattr(model, name).grad.full_tensor(), mean)


def again_and_again(rank: int, size: int, steps: int) -> None:
    """A third of the steps fails, anywhere: the others are those of a run that skipped them."""
    places = random.Random(7)
    failing = set(places.sample(range(steps), steps // 3))
    job, other = Job(rank), Job(rank)
    losses = []
    for step in range(steps):
        struck, place = places.randrange(size), places.choice(("forward", "backward", "step", ""))
        fails = step in failing

        def trap(at: str) -> None:
            if fails and struck == rank and place == at:  # noqa: B023
                raise ValueError("deliberate")

        hooks = [
            job.model.blocks[1].register_forward_pre_hook(lambda *_: trap("forward")),
            job.optimizer.register_step_post_hook(lambda *_: trap("step")),
        ]
        caught = None
        try:
            with job.attempted():
                loss = job.loss(step)
                if place == "backward":
                    loss.register_hook(lambda grad: trap("backward"))
                loss.backward()
                trap("")
                job.optimizer.step()
                job.optimizer.zero_grad()
        except AttemptError as error:
            caught = error
        for hook in hooks:
            hook.remove()
        assert fails == (caught is not None), caught
        if caught is None:
            losses.append(loss.item())
        else:
            assert caught.ranks == (struck,), (place, caught)
    assert losses == [other.step(step) for step in range(steps) if step not in failing]
    assert all(map(torch.equal, job.weights(), other.weights()))


def again_at_once(rank: int, size: int) -> None:
    """A rank fails in its next attempt before another has left the one before."""
    expected, job = undisturbed(rank), Job(rank)
    job.step(0)

    def leave(epoch: int) -> None:
        deadline = time.monotonic() + PATIENT_SECONDS
        while rank and current_alarm().report is None and time.monotonic() < deadline:
            current_alarm().look()
        left(epoch)

    module: Any = verdict
    left = module.go_on_to
    for last in (False, True):
        module.go_on_to = left if last else leave
        handles = []
        if rank == 0:
            trap = raising(ValueError("deliberate"))
            handles.append(job.model.blocks[1].register_forward_pre_hook(trap))
        error = failure(job.attempted(), lambda: job.step(1), "rank 0: ValueError: deliberate")
        assert error.ranks == (0,)
        for handle in handles:
            handle.remove()
    job.recovers(expected)


def overwritten(rank: int, size: int) -> None:
    """What ranks compare at the end of a backward is spoiled: an error and not a hang."""
    expected, job = undisturbed(rank), Job(rank)
    job.step(0)
    module: Any = polyshard_resilience.device
    compare, seconds = module._compare, module.store_timeout_seconds
    module._compare = lambda *args: compare(*args).fill_(rank + 1)
    module.store_timeout_seconds = lambda store: 0.5
    told(lambda: job.step(1), "its memory was overwritten")
    module._compare, module.store_timeout_seconds = compare, seconds
    job.recovers(expected)


def memory_runs_out(rank: int, size: int) -> None:
    """In the middle of a forward of one rank, again and again until a micro-batch is small."""
    job, other = Job(rank), Job(rank)
    tried: list[int] = []
    if device() == "cuda":  # the simulated one was made with as little
        gc.collect()
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() + CAPACITY_BYTES
        whole = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(allowed / whole)

    def allocate(*_: object) -> None:
        if rank == 1:
            torch.empty(tried[-1] * LARGE_BYTES, dtype=torch.uint8, device=device())

    hook = job.model.blocks[1].register_forward_pre_hook(allocate)
    for trial in polyshard_resilience.attempts(job.model, job.optimizer, sizes=(8, 4, 2, 1)):
        with trial as rows:
            tried.append(rows)
            job.step(0)
    assert tried == [8, 4, 2, 1]
    tried.append(4)
    error = failure(job.attempted(), lambda: job.step(1), "rank 1: OutOfMemoryError")
    assert error.is_out_of_memory
    hook.remove()
    for step in (0, 1):
        other.step(step)
    job.step(1)
    assert all(map(torch.equal, job.weights(), other.weights()))


def without_a_backward(rank: int, size: int) -> None:
    """One leaves out a backward that transfers nothing: it is compared with the next."""
    mesh = init_device_mesh(device(), (size,))
    model: Any = polyshard.fully_shard(torch.nn.Linear(4, 4).to(device()), mesh=mesh)
    x = torch.ones(1, 4, device=device())
    for step in range(2):
        with model.no_sync():
            loss = model(x).sum()
            if rank != step:
                loss.backward()
            else:
                model.reshard()
        model(x).sum().backward()
        assert model.weight.grad.full_tensor().unique().item() == 2 - 1 / size
        model.zero_grad()


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest) -> Iterator[dict[int, Any]]:
    """Ranks with a device each: the simulated one, unless there is ``--device=cuda``."""
    if request.config.getoption("--device") == "cuda":
        found: dict[int, Any] = {
            size: World(size, collective_seconds=60.0, device="cuda") for size in (2, 4)
        }
    else:
        sim = pytest.importorskip("polyshard_sim.testing", reason="needs polyshard-sim")
        if not pytest.importorskip("polyshard_sim").is_buildable():
            pytest.skip("needs a C++ compiler and ninja")
        found = {
            size: sim.Ranks(size, collective_seconds=60.0, capacity_bytes=CAPACITY_BYTES)
            for size in (2, 4)
        }
    yield found
    for ranks in found.values():
        ranks.close()


CASES = (
    in_a_step,
    while_synchronizing,
    in_a_collective_of_their_own,
    in_another_order,
    with_other_gradients,
    again_at_once,
    overwritten,
    memory_runs_out,
    without_a_backward,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_all_ranks_are_told_and_go_on(worlds: dict[int, Any], size: int, case: Any) -> None:
    worlds[size].run(case, timeout=100.0)


@pytest.mark.parametrize("steps", [12, pytest.param(60, marks=pytest.mark.thorough)])
def test_steps_that_fail_are_as_if_skipped(worlds: dict[int, Any], steps: int) -> None:
    worlds[2].run(again_and_again, steps, timeout=200.0)


def killed(rank: int, size: int) -> None:
    job = Job(rank)
    job.step(0)
    await_all("stepped", size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def waits() -> None:
        with torch.no_grad():
            job.loss(1).item()  # of no value, but it ends; or it is told before it begins
        job.step(1)

    told(waits, "rank 1 is gone", "restart the job from its last checkpoint")


def test_a_rank_is_killed_while_the_host_waits_for_the_device(worlds: dict[int, Any]) -> None:
    with pytest.raises(Exception, match="rank 1") as caught:
        worlds[2].run(killed, timeout=60.0)
    assert str(caught.value).count("--- rank") == 1, caught.value
