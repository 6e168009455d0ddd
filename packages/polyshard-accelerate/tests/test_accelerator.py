"""accelerate's own loop, with polyshard's accelerator, computes what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="pip install 'polyshard-accelerate[accelerate]'")

import torch
from accelerate import Accelerator
from accelerate_runs import (
    Odd,
    alone,
    as_launched,
    assert_equal,
    assert_same_bits,
    batch,
    optimizer_of,
    whole,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import polyshard
import polyshard_optimizers
from polyshard.errors import (
    CheckpointError,
    LifecycleError,
    ModuleError,
    SettingError,
    UnsupportedError,
)
from polyshard_accelerate import PolyshardAccelerator, Sharding
from polyshard_testing import World, raises_in_step, ranks


def made(rank: int, size: int, sharding: Sharding | None = None, **given: Any) -> Any:
    as_launched(rank, size)
    return PolyshardAccelerator(sharding=sharding, cpu=True, **given)


def train(
    accelerator: Any, model: Any, optimizer: Any, steps: range, clip: float | None = None
) -> list[float]:
    losses = []
    for step in steps:
        with accelerator.accumulate(model):
            loss = model(batch(step, accelerator.process_index))
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ranks(2, 3)
@pytest.mark.parametrize("order", ["together", "model first", "optimizer first"])
def test_weights_are_those_of_one_process(rank: int, size: int, order: str) -> None:
    accelerator, model = made(rank, size), Odd()
    optimizer: Any = optimizer_of(model)
    if order == "together":
        optimizer, model = accelerator.prepare(optimizer, model)
    elif order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    train(accelerator, model, optimizer, range(4))
    assert_equal(whole(model), alone(size, 4))


@ranks(2)
@pytest.mark.parametrize("flat", [False, True], ids=["by parameter", "flat"])
def test_accumulation_reduces_once_and_clips_the_sum(rank: int, size: int, flat: bool) -> None:
    accelerator = made(rank, size, Sharding(flat=flat), gradient_accumulation_steps=2)
    model = Odd()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    train(accelerator, model, optimizer, range(4), clip=0.05)
    assert_equal(whole(model), alone(size, 4, accumulate=2, clip=0.05))
    assert {one.reductions for one in polyshard.stats(model).groups.values()} <= {0, 2}


def run(rank: int, size: int, folder: Path, *, half: bool, resume: bool) -> Any:
    """Losses and weights of steps 0 to 3, of the first two, or of the others after loading."""
    accelerator, model = made(rank, size), Odd()
    optimizer: Any = optimizer_of(model)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, size, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    steps = range(2, 4) if resume else range(2 if half else 4)
    if resume:
        accelerator.load_state(folder)
    losses = []
    for step in steps:
        losses += train(accelerator, model, optimizer, range(step, step + 1))
        schedule.step()
    if half:
        assert Path(accelerator.save_state(folder)) == folder
    return losses, whole(model)


@ranks(2)
def test_a_run_that_was_saved_goes_on_with_the_same_bits(
    rank: int, size: int, tmp_path: Path
) -> None:
    losses, weights = run(rank, size, tmp_path, half=False, resume=False)
    first, _ = run(rank, size, tmp_path, half=True, resume=False)
    second, found = run(rank, size, tmp_path, half=False, resume=True)
    assert first + second == losses
    assert_same_bits(found, weights)


def save(rank: int, size: int, folder: Path) -> dict[str, torch.Tensor]:
    _, weights = run(rank, size, folder, half=True, resume=False)
    return dict(weights)


def load(rank: int, size: int, folder: Path) -> dict[str, torch.Tensor]:
    accelerator, model = made(rank, size), Odd()
    optimizer: Any = optimizer_of(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.load_state(folder)
    assert {int(s["step"]) for s in optimizer.state_dict()["state"].values()} == {2}
    return whole(model)


def test_another_number_of_ranks(world2: World, world3: World, tmp_path: Path) -> None:
    expected, _ = world2.run(save, tmp_path)
    for found in world3.run(load, tmp_path):
        assert_same_bits(found, expected)


@ranks(2)
def test_whole_weights(rank: int, size: int, tmp_path: Path) -> None:
    accelerator, model = made(rank, size), Odd()
    model = accelerator.prepare(model)
    accelerator.save_model(model, tmp_path)
    accelerator.wait_for_everyone()
    from safetensors.torch import load_file

    assert_same_bits(load_file(tmp_path / "model.safetensors"), whole(Odd()))


@ranks(4)
def test_replicas_units_and_policy(rank: int, size: int) -> None:
    as_launched(rank, size)
    mesh = torch.distributed.device_mesh.init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    policy = polyshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharding = Sharding(units=["blocks.*/2"], mesh=mesh, mp_policy=policy)
    accelerator, model = made(rank, size, sharding), Odd()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    train(accelerator, model, optimizer, range(3))
    found = whole(model)
    for name, parameter in alone(size, 3).named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0.05, atol=0.05)
    names = {group.name.partition("#")[0] for group in polyshard.describe(model).groups}
    assert names == {"blocks.0", "blocks.2", "(root)"}


@ranks(2)
def test_bf16_is_autocast(rank: int, size: int) -> None:
    accelerator, model = made(rank, size, mixed_precision="bf16"), Odd()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    train(accelerator, model, optimizer, range(3))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    found = whole(model)
    for name, parameter in alone(size, 3).named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0.05, atol=0.05)


class Breaks(Odd):
    """Raises once, in the middle of a forward of one rank."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            self.fails = False
            self.blocks[0](x)
            raise ArithmeticError("a batch of one rank")
        return super().forward(x)


@ranks(2)
def test_an_exception_on_one_rank_ends_the_step_of_all(rank: int, size: int) -> None:
    accelerator, model = made(rank, size), Breaks()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    train(accelerator, model, optimizer, range(2))
    model.fails = rank == 1
    with raises_in_step(ArithmeticError, "a batch of one rank"):
        train(accelerator, model, optimizer, range(2, 3))
    model.reset_iter_state()
    optimizer.zero_grad()
    train(accelerator, model, optimizer, range(2, 4))
    assert_equal(whole(model), alone(size, 4))


@ranks(2)
def test_what_is_refused(rank: int, size: int, tmp_path: Path) -> None:
    accelerator, model = made(rank, size), Odd()
    optimizer = optimizer_of(model)
    model(batch(0, 0)).backward()
    optimizer.step()
    with pytest.raises(LifecycleError, match="Prepare the model first"):
        accelerator.prepare(model, optimizer)
    partly = Odd()
    fully_shard(partly.blocks[0])
    with pytest.raises(ModuleError, match=r"'blocks.0' is sharded already, by torch"):
        accelerator.prepare(partly)
    with pytest.raises(SettingError, match="layers"):
        made(rank, size, Sharding(units=["layers.*"])).prepare(Odd())
    empty = made(rank, size)
    empty.prepare(Odd())
    Accelerator(cpu=torch.get_default_device().type == "cpu").save_state(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint of polyshard"):
        empty.load_state(tmp_path)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without one")
@ranks(2)
def test_ranks_that_accelerate_does_not_see(
    rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_launched(rank, size)
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    with pytest.raises(UnsupportedError, match=r"1 process, but there are 2 ranks.*cpu=True"):
        PolyshardAccelerator()


@ranks(2)
def test_a_schedule_of_an_optimizer_that_becomes_flat(rank: int, size: int) -> None:
    accelerator, model = made(rank, size, Sharding(flat=True)), Odd()
    optimizer: Any = optimizer_of(model)
    too_early = torch.optim.lr_scheduler.StepLR(optimizer, size, gamma=0.5)
    with pytest.raises(LifecycleError, match="scheduler was made of this AdamW before"):
        accelerator.prepare(model, optimizer, too_early)
    flat = polyshard_optimizers.flat(optimizer_of(model))  # one that is flat already may have one
    accelerator.prepare(flat, torch.optim.lr_scheduler.StepLR(flat, size))
    accelerator, model = made(rank, size, Sharding(flat=True)), Odd()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, size, gamma=0.5)
    schedule = accelerator.prepare(schedule)
    rates = []
    for step in range(3):
        train(accelerator, model, optimizer, range(step, step + 1))
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [5e-3, 2.5e-3, 1.25e-3]  # accelerate steps it once for each rank


@ranks(2)
def test_an_accelerator_that_is_there_becomes_one(rank: int, size: int) -> None:
    as_launched(rank, size)
    plain = Accelerator(cpu=True)
    found = PolyshardAccelerator.of(plain, Sharding())
    assert found is plain
    assert PolyshardAccelerator.of(found, Sharding()) is found
    other: Any = type("Other", (Accelerator,), {})
    with pytest.raises(UnsupportedError, match="Derive it from PolyshardAccelerator"):
        PolyshardAccelerator.of(other(cpu=True), Sharding())
    tied: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    found.prepare(tied)
    assert tied[1].weight is tied[0].weight


@ranks(2)
def test_optimizers_are_saved_after_an_evaluation(rank: int, size: int, tmp_path: Path) -> None:
    stays = Sharding(reshard_after_forward=False)  # gathered, until the next backward
    accelerator, model = made(rank, size, stays), Odd()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    train(accelerator, model, optimizer, range(2))
    model(batch(2, rank))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    accelerator.save_state(tmp_path)
    load(rank, size, tmp_path)


@ranks(2)
def test_optimizers_of_no_model_are_saved_as_accelerate_does(
    rank: int, size: int, tmp_path: Path
) -> None:
    def prepared() -> tuple[Any, Any, Any, nn.Parameter]:
        accelerator, model = made(rank, size), Odd()
        temperature = nn.Parameter(torch.ones(2))
        optimizers = optimizer_of(model), torch.optim.Adam([temperature], lr=0.1)
        return accelerator, *accelerator.prepare(model, *optimizers)[::2], temperature

    accelerator, _, other, temperature = prepared()
    temperature.grad = torch.tensor([1.0, 2.0])
    other.step()
    accelerator.save_state(tmp_path)
    accelerator, _, again, _ = prepared()
    accelerator.load_state(tmp_path)
    (state,) = again.optimizer.state.values()
    assert torch.allclose(state["exp_avg"], torch.tensor([0.1, 0.2]))


@ranks(2)
def test_an_optimizer_of_two_models_is_refused_before_anything_is_saved(
    rank: int, size: int, tmp_path: Path
) -> None:
    accelerator, one, two = made(rank, size), nn.Linear(3, 2), nn.Linear(2, 3)
    both = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    accelerator.prepare(one, two, both)
    with pytest.raises(UnsupportedError, match="SGD has parameters of several models"):
        accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def save_between_reductions(rank: int, size: int, folder: Path) -> None:
    accelerator, model = made(rank, size, gradient_accumulation_steps=2), Odd()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    train(accelerator, model, optimizer, range(3))
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, range(3, 4))
    assert_equal(whole(model), alone(size, 4, accumulate=2))


def go_on(rank: int, size: int, folder: Path) -> int:
    accelerator, model = made(rank, size, gradient_accumulation_steps=2), Odd()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    accelerator.load_state(folder)
    found: int = accelerator.step
    train(accelerator, model, optimizer, range(3, 4))
    return found


def test_ranks_that_are_new_reduce_with_the_others(
    world2: World, world3: World, tmp_path: Path
) -> None:
    world2.run(save_between_reductions, tmp_path)
    assert world3.run(go_on, tmp_path) == [3, 3, 3]


@ranks(2)
def test_a_compiled_model_is_saved_whole(rank: int, size: int, tmp_path: Path) -> None:
    accelerator = made(rank, size, dynamo_backend="eager")
    model = accelerator.prepare(Odd())
    assert isinstance(model, torch._dynamo.OptimizedModule)
    accelerator.save_model(model, tmp_path)
    accelerator.wait_for_everyone()
    from safetensors.torch import load_file

    assert_same_bits(load_file(tmp_path / "model.safetensors"), whole(Odd()))
