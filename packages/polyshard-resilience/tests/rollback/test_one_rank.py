"""What an attempt puts back, shown on one rank: everything, bitwise."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from toy_attempts import failure, raising
from toy_lifetimes import Lasting
from toy_runs import assert_equal

import polyshard
import polyshard_resilience
from polyshard._torch.random_state import RandomState
from polyshard.errors import LifecycleError, SettingError
from polyshard_resilience.errors import AttemptError
from polyshard_testing import ranks


class Normed(nn.Module):
    """With buffers that a forward changes, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.last = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.dropout(self.norm(self.first(x)), 0.2))
        return out


class Job:
    """A small run, and all of it as values."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.plugin = Lasting()
        self.model: Any = Normed()
        polyshard.fully_shard(self.model.first, plugins=[self.plugin])
        polyshard.fully_shard(self.model, plugins=[self.plugin])
        settings = {"lr": 0.1, **settings}
        self.optimizer = kind(self.model.parameters(), **settings)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def backward(self) -> None:
        x = torch.randn(8, 6) + random.random() + float(np.random.rand())
        self.model(x).square().mean().backward()
        for kept in self.plugin.kept.values():
            kept.value += 1.0

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def attempted(self, **options: Any) -> Any:
        return polyshard_resilience.attempt(
            self.model, self.optimizer, also=[self.scheduler], **options
        )

    def everything(self) -> dict[str, Any]:
        def values(tree: Any) -> Any:
            if isinstance(tree, dict):
                return {k: values(v) for k, v in tree.items()}
            whole = getattr(tree, "full_tensor", lambda: tree)()
            return whole.detach().clone() if isinstance(whole, Tensor) else whole

        return {
            "model": values(dict(self.model.state_dict())),
            "state": [values(self.optimizer.state.get(p)) for p in self.model.parameters()],
            "groups": [
                {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
            ],
            "scheduler": dict(self.scheduler.state_dict()),
            "gradients": [values(p.grad) for p in self.model.parameters()],
            "plugin": [kept.state_dict() for kept in self.plugin.kept.values()],
            "random": RandomState().state_dict(),
        }


def fail(job: Job, where: str) -> None:
    """One step that fails."""
    if where == "forward":
        handle = job.model.last.register_forward_hook(_raise)
        try:
            job.step()
        finally:
            handle.remove()
    elif where == "backward":
        x = torch.randn(8, 6)
        out = job.model(x)
        out.register_hook(_raise)
        out.sum().backward()
    elif where == "before the step":
        job.backward()
        raise ValueError("deliberate")
    elif where == "in the step":
        job.backward()
        job.optimizer.register_step_post_hook(_raise)
        job.optimizer.step()
    else:
        job.step()
        raise ValueError("deliberate")


def _raise(*args: object, **kwargs: object) -> None:
    raise ValueError("deliberate")


PLACES = ["forward", "backward", "before the step", "in the step", "after the step"]


@ranks(1)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_everything_is_put_back(rank: int, size: int, place: str, steps: int) -> None:
    job = Job()
    for _ in range(steps):
        with job.attempted():
            job.step()
    before, objects = job.everything(), [id(p) for p in job.model.parameters()]
    error = failure(job.attempted(), lambda: fail(job, place), "rank 0: ValueError: deliberate")
    assert isinstance(error.__cause__, ValueError)
    assert error.ranks == (0,)
    assert error.is_undone
    assert_equal(job.everything(), before)
    assert [id(p) for p in job.model.parameters()] == objects
    job.optimizer._optimizer_step_post_hooks.clear()
    job.step()
    found = job.everything()
    other = Job()  # a run in which nothing failed
    for _ in range(steps + 1):
        other.step()
    assert_equal(found, other.everything())


@ranks(1)
def test_gradients_from_before_are_kept(rank: int, size: int) -> None:
    """Micro-batches before the block, reduced and not: a failed one leaves their sums alone."""
    for synchronised in (True, False):
        job = Job(torch.optim.SGD)
        for failing in (True, False):
            job.model.set_requires_gradient_sync(synchronised)
            job.backward()
            if failing:
                body = raising(ValueError(), job.backward, job.model.zero_grad, job.backward)
                failure(job.attempted(), body)
            job.model.set_requires_gradient_sync(True)
            with job.attempted():
                job.backward()
            if failing:
                found, job = job.everything(), Job(torch.optim.SGD)
        wanted = job.everything()
        assert all(g is not None for g in wanted["gradients"])
        assert_equal(found, wanted)


@ranks(1)
def test_only_steps_need_copies(rank: int, size: int) -> None:
    for place in PLACES[:3]:
        job = Job()
        before = job.everything()
        assert failure(job.attempted(undo_steps=False), partial(fail, job, place)).is_undone
        assert_equal(job.everything(), before)
    for place in PLACES[3:]:
        job = Job()
        final = r"undo_steps=False.*Load the last"
        error = failure(job.attempted(undo_steps=False), partial(fail, job, place), final)
        assert not error.is_undone


@ranks(1)
def test_memory_is_used_again(rank: int, size: int) -> None:
    from polyshard_resilience.rollback.undo import memories_of

    job = Job()
    for _ in range(3):
        with job.attempted():
            job.step()
    memories = memories_of(job.model)
    memory = memories.steps[job.optimizer]

    def addresses() -> list[int]:
        return [b.data_ptr() for m in (memory.parameters, memory.state) for b in m._buffers]

    before = addresses()
    with job.attempted():
        job.step()
    assert addresses() == before
    weights = sum(p.nbytes for p in job.model.parameters())
    steps = 4 * len(list(job.model.parameters()))
    assert memory.nbytes == 3 * weights + steps


@ranks(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interruptions_go_through(rank: int, size: int, error: type[BaseException]) -> None:
    job = Job()
    before = job.everything()
    with pytest.raises(error), job.attempted():
        raising(error(), job.step)()
    assert_equal(job.everything(), before)


@ranks(1)
def test_refusals(rank: int, size: int) -> None:
    job = Job()
    with pytest.raises(SettingError, match="call fully_shard first"):
        polyshard_resilience.attempt(nn.Linear(2, 2))
    with pytest.raises(SettingError, match="got SGDX"):
        polyshard_resilience.attempt(job.model, type("SGDX", (), {})())
    with pytest.raises(SettingError, match="also=int"):
        polyshard_resilience.attempt(job.model, also=[3])  # type: ignore[list-item]
    with pytest.raises(SettingError, match="nothing to try"):
        polyshard_resilience.attempts(job.model, job.optimizer, sizes=())
    under_way = "LifecycleError: an attempt of this model is under way"
    failure(job.attempted(), lambda: job.attempted().__enter__(), under_way)
    once = job.attempted()
    with once:
        job.step()
    with pytest.raises(LifecycleError, match="entered before"):
        once.__enter__()
    for trial in (trials := polyshard_resilience.attempts(job.model, job.optimizer, sizes=(2, 1))):
        assert trial.size == 2
        break
    with pytest.raises(LifecycleError, match="was not entered"):
        next(trials)


class Greedy:
    """Runs out of memory for batches that are too large."""

    def __init__(self, error: Exception, fits: int) -> None:
        self.error, self.fits, self.seen = error, fits, list[int]()

    def __call__(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self.seen.append(len(args[0]))
        if len(args[0]) > self.fits:
            raise self.error


MEMORY_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
]


@ranks(1)
@pytest.mark.parametrize("which", range(3))
def test_a_smaller_batch_is_tried(rank: int, size: int, which: int) -> None:
    """As if the smaller size had been taken at once."""
    found = []
    for sizes in ((8, 4, 2), (2,)):
        job = Job()
        greedy = Greedy(MEMORY_ERRORS[which], 3)
        job.model.last.register_forward_pre_hook(greedy)
        x = torch.randn(8, 6)
        for trial in polyshard_resilience.attempts(job.model, job.optimizer, sizes):
            with trial as micro:
                for part in x.split(micro):
                    job.model(part).square().sum().backward()
                job.optimizer.step()
                job.optimizer.zero_grad()
        assert trial.succeeded
        assert greedy.seen == ([8, 4, 2, 2, 2, 2] if len(sizes) > 1 else [2] * 4)
        found.append(job.everything())
    assert_equal(found[0], found[1])


@ranks(1)
def test_the_last_size_raises(rank: int, size: int) -> None:
    job = Job()
    job.model.last.register_forward_pre_hook(Greedy(MemoryError("host"), 1))
    seen: list[int] = []

    def run(body: Callable[[int], object]) -> None:
        for trial in polyshard_resilience.attempts(job.model, job.optimizer, (4, 2)):
            with trial as micro:
                seen.append(micro)
                body(micro)

    with pytest.raises(AttemptError, match=r"rank 0: MemoryError: host.*smaller") as caught:
        run(lambda micro: job.model(torch.randn(micro, 6)).sum().backward())
    assert seen == [4, 2]
    assert caught.value.is_out_of_memory
    with pytest.raises(AttemptError, match="KeyError") as caught:
        run(raising(KeyError("other errors are not tried again")))
    assert seen == [4, 2, 4]
    assert not caught.value.is_out_of_memory


@ranks(1)
@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_optimizers(rank: int, size: int, settings: dict[str, Any]) -> None:
    job = Job(torch.optim.Adam, **settings)
    job.step()
    before = job.everything()

    def meddle() -> None:
        job.step()
        job.optimizer.state.clear()
        job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        job.optimizer.param_groups[0]["lr"] = 7.0

    failure(job.attempted(), raising(ValueError(), meddle))
    assert_equal(job.everything(), before)
    failure(job.attempted(), raising(ValueError(), job.scheduler.step), "undone|before the attempt")
    assert_equal(job.everything(), before)


@ranks(1)
def test_optimizers_that_step_in_backward(rank: int, size: int) -> None:
    for undo in (True, False):
        job = Job(torch.optim.SGD)
        each = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in job.model.parameters()]
        for p, optimizer in zip(job.model.parameters(), each, strict=True):
            p.register_post_accumulate_grad_hook(_stepping(optimizer))
        job.backward()
        before = job.everything()
        pattern = "steps in backward" if not undo else "deliberate"
        attempt = polyshard_resilience.attempt(job.model, each, undo_steps=undo)
        failure(attempt, raising(ValueError("deliberate"), job.backward), pattern)
        assert_equal(job.everything(), before)


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    def step(parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


@ranks(1)
def test_optimizers_of_the_same_parameters_go_back_in_order(rank: int, size: int) -> None:
    model: Any = polyshard.fully_shard(nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)]
    before = [p.detach().clone() for p in model.parameters()]

    def both() -> None:
        model(torch.ones(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        raise ValueError("after both")

    failure(polyshard_resilience.attempt(model, optimizers), both, "after both")
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach(), expected)


@ranks(2)
def test_a_failure_of_a_rank_that_shards_alone_is_its_own(rank: int, size: int) -> None:
    mesh = DeviceMesh(torch.get_default_device().type, [rank])
    model: Any = polyshard.fully_shard(nn.Linear(4, 4), mesh=mesh)
    attempt = polyshard_resilience.attempt(model)
    assert failure(attempt, raising(ValueError("alone")), f"rank {rank}").ranks == (rank,)
