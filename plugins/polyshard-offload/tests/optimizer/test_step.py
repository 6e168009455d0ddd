"""The user's optimizer stays the user's."""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_toys import (
    Recipe,
    assert_same_state,
    assert_same_values,
    on,
    sharded_toy,
    tokens_for,
    train,
    wrapped,
)
from torch import nn
from torch.distributed.tensor import DTensor
from toy_models import loss_of

from polyshard import fully_shard
from polyshard.errors import PeerError
from polyshard_offload import CorruptedError, DiskSettings, Offload, OffloadError, StorageError
from polyshard_offload.tiers.block_io import Calls
from polyshard_optimizers.stepping import Twins
from polyshard_testing import World, ranks


def parameters(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(40, 5)) for _ in range(count)]


def give_gradients(params: Sequence[nn.Parameter]) -> None:
    for index, p in enumerate(params):
        p.grad = torch.full_like(p, 0.1 + index)


# Without any process group: plain parameters are an optimizer's as well --------------------------


def test_what_cannot_be_wrapped_says_why(tmp_path: Path) -> None:
    offload = on(str(tmp_path))
    with pytest.raises(OffloadError, match=r"takes a torch\.optim\.Optimizer, got int"):
        offload.wrap(3)  # type: ignore[type-var]
    with pytest.raises(OffloadError, match=r"LBFGS\.step needs a closure"):
        offload.wrap(torch.optim.LBFGS(parameters()))
    optimizer = torch.optim.Adam(parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(OffloadError, match="make the scheduler from its result"):
        offload.wrap(optimizer)
    optimizer = offload.wrap(torch.optim.Adam(parameters()))
    with pytest.raises(OffloadError, match="wrapped already"):
        offload.wrap(optimizer)
    with pytest.raises(OffloadError, match="every chunk of parameters"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(OffloadError, match="cannot be deep-copied"):
        copy.deepcopy(optimizer)


def test_the_object_and_its_class_stay(tmp_path: Path) -> None:
    given = torch.optim.AdamW(parameters())
    groups = given.param_groups
    optimizer = on(str(tmp_path)).wrap(given)
    assert optimizer is given
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups is groups
    assert type(optimizer).__name__ == "OffloadedAdamW"


def test_on_the_device_nothing_is_wrapped() -> None:
    optimizer = torch.optim.AdamW(parameters())
    assert type(Offload().wrap(optimizer)) is torch.optim.AdamW


def test_hooks_run_once_a_step(tmp_path: Path) -> None:
    params = parameters()
    optimizer = on(str(tmp_path)).wrap(torch.optim.Adam(params))
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *a: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *a: seen.append("post"))
    for _ in range(2):
        give_gradients(params)
        optimizer.step()
    assert seen == ["pre", "post"] * 2


def test_groups_may_be_added(tmp_path: Path) -> None:
    mine, theirs = parameters(4), parameters(4)
    optimizer = on(str(tmp_path)).wrap(torch.optim.Adam(mine[:2], lr=0.1))
    plain = torch.optim.Adam(theirs[:2], lr=0.1)
    for opt, params in ((optimizer, mine), (plain, theirs)):
        for step in range(4):
            if step == 2:
                opt.add_param_group({"params": params[2:], "lr": 0.01})
            give_gradients(params)
            opt.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert_same_state(optimizer, plain)


def test_state_from_before_moves(tmp_path: Path) -> None:
    mine, theirs = parameters(), parameters()
    optimizer, plain = torch.optim.Adam(mine, lr=0.1), torch.optim.Adam(theirs, lr=0.1)
    for opt, params in ((optimizer, mine), (plain, theirs)):
        give_gradients(params)
        opt.step()
    on(str(tmp_path)).wrap(optimizer)
    assert_same_state(optimizer, plain)
    for opt in (optimizer, plain):
        opt.step()
    assert_same_state(optimizer, plain)


def test_users_may_write_to_the_state(tmp_path: Path) -> None:
    """Also to what the buffers still hold from the last step."""
    mine, theirs = parameters(), parameters()
    optimizer = on(str(tmp_path)).wrap(torch.optim.Adam(mine, lr=0.1))
    plain = torch.optim.Adam(theirs, lr=0.1)
    for _ in range(4):
        for opt, params in ((optimizer, mine), (plain, theirs)):
            give_gradients(params)
            opt.step()
            for p in params:
                opt.state[p]["exp_avg"].mul_(0.5)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert_same_state(optimizer, plain)


def test_amp_scaling_skips_and_steps(tmp_path: Path) -> None:
    mine, theirs = parameters(), parameters()
    optimizer = on(str(tmp_path)).wrap(torch.optim.AdamW(mine, lr=0.1))
    plain = torch.optim.AdamW(theirs, lr=0.1)
    for opt, params in ((optimizer, mine), (plain, theirs)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            loss = sum(((p * (step + 1)).square().sum() for p in params), torch.zeros(()))
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class Coupled(torch.optim.Optimizer):
    """Scales all parameters of a group by what it saw of them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"seen": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] = float(sum(p.grad.sum() for p in group["params"]))
            for p in group["params"]:
                self.state[p]["last"] = p.grad.clone()
                p.sub_(group["seen"] * p.grad)


def test_coupled_parameters_are_noticed(tmp_path: Path) -> None:
    params = parameters()
    optimizer = on(str(tmp_path)).wrap(Coupled(params))
    give_gradients(params)
    with pytest.raises(OffloadError, match="Coupled computed 'seen' of parameter group 0"):
        optimizer.step()


def test_no_room_is_found_before_the_first_step(tmp_path: Path) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if offset > 20_000:
            raise OSError(28, os.strerror(28))
        os.posix_fallocate(descriptor, offset, nbytes)

    offload = on(str(tmp_path))
    offload.tiers.calls = Calls(fallocate=full)
    with pytest.raises(StorageError, match=r"reserving .* bytes for optimizer state .*Free some"):
        offload.wrap(torch.optim.Adam([nn.Parameter(torch.ones(5000)) for _ in range(3)]))


def test_a_failed_step_is_not_followed_by_another(tmp_path: Path) -> None:
    """Half of the parameters are updated: only a checkpoint helps, and it does."""
    fail = [False]

    def write(descriptor: int, memories: Sequence[memoryview], offset: int) -> int:
        if fail[0] and offset > 8192:
            raise OSError(5, os.strerror(5))
        return os.pwritev(descriptor, memories, offset)

    offload, params = on(str(tmp_path)), parameters(8)
    offload.tiers.calls = Calls(pwritev=write)
    optimizer = offload.wrap(torch.optim.Adam(params))
    give_gradients(params)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    fail[0] = True
    with pytest.raises(StorageError, match="resume from the last checkpoint"):
        optimizer.step()
    fail[0] = False
    with pytest.raises(OffloadError, match="an earlier step failed half way"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    for mine, theirs in zip(
        optimizer.state_dict()["state"].values(), saved["state"].values(), strict=True
    ):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    optimizer.step()


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_interrupted_step_is_not_followed_by_another(tmp_path: Path, in_backward: bool) -> None:
    """An interrupt (of the keyboard, say) leaves as much half done as an error does."""
    offload, params = on(str(tmp_path), step_in_backward=in_backward), parameters(8)
    optimizer = offload.wrap(torch.optim.Adam(params))

    def step() -> None:
        torch.stack([p * p for p in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.MonkeyPatch.context() as patched:
        _interrupt(patched, after=1)
        with pytest.raises(KeyboardInterrupt):
            step()
    optimizer.zero_grad()
    with pytest.raises(OffloadError, match="an earlier step failed half way"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    step()


def _interrupt(patched: pytest.MonkeyPatch, after: int) -> None:
    """Press Ctrl-C when a step comes to other parts than the first ``after``."""
    original, seen = Twins.step, []

    def interrupted(self: Twins, *given: Any) -> None:
        seen.append(self)
        if len(seen) > after:
            raise KeyboardInterrupt
        original(self, *given)

    patched.setattr(Twins, "step", interrupted)


def test_a_changed_page_is_found_when_stepping_and_saving(tmp_path: Path) -> None:
    settings = DiskSettings(path=tmp_path, checksums=True)
    offload, params = on("", disk=settings, prefetch=0), parameters(8)
    optimizer = offload.wrap(torch.optim.Adam(params))
    for _ in range(3):
        give_gradients(params)
        optimizer.step()
    optimizer.state_dict()
    file = offload.tiers.files["optimizer state"]
    file.write(4096, torch.full((4096,), 7, dtype=torch.uint8))
    with pytest.raises(CorruptedError, match="rank 0: optimizer state at byte 4096"):
        optimizer.state_dict()
    with pytest.raises(CorruptedError, match="rank 0: optimizer state at byte 4096"):
        step_twice(optimizer)  # the first may still have the page in a buffer


def step_twice(optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.step()


# On ranks --------------------------------------------------------------------------------------


def slow_calls(seed: int) -> Calls:
    """System calls that take as long as they like."""
    generator = torch.Generator().manual_seed(seed)

    def nap() -> None:
        time.sleep(float(torch.rand((), generator=generator)) * 0.004)

    def read(descriptor: int, memories: Sequence[memoryview], offset: int) -> int:
        nap()
        return os.preadv(descriptor, memories, offset)

    def write(descriptor: int, memories: Sequence[memoryview], offset: int) -> int:
        nap()
        return os.pwritev(descriptor, memories, offset)

    return Calls(preadv=read, pwritev=write)


@ranks(2)
def test_integers_beside_what_is_trained(rank: int, size: int) -> None:
    """A frozen parameter that can have no gradient is handed to the optimizer like any other."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(8, 6)
            self.scale = nn.Parameter(torch.arange(6), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = (self.linear(x) * self.scale).square().mean()
            return loss

    offload = Offload(params="host")
    model, reference = fully_shard(Scaled(), plugins=[offload]), Scaled()
    optimizer = offload.wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
    expected = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for _ in range(2):
        for each, step in ((model, optimizer), (reference, expected)):
            each(torch.ones(2, 8)).backward()
            step.step()
            step.zero_grad()
    for name, value in reference.named_parameters():
        found = model.get_parameter(name)
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor().cpu(), value.detach().cpu())
    assert all(len(optimizer.state[p]) > 0 for p in model.linear.parameters())


@pytest.mark.parametrize("params", ["device", "disk"])
@ranks(2)
def test_delays_change_no_bit(rank: int, size: int, params: str, tmp_path: Path) -> None:
    path = str(tmp_path)
    recipe = Recipe(steps=4, clip=0.1)
    plain = sharded_toy(None, recipe)
    expected_optimizer = recipe.make_optimizer(plain)
    expected = train(plain, expected_optimizer, rank, recipe)
    for seed in range(2):
        offload = on(path, params=params)
        offload.tiers.calls = slow_calls(10 * rank + seed)
        model = sharded_toy(offload, recipe)
        optimizer = wrapped(recipe.make_optimizer(model), offload)
        assert train(model, optimizer, rank, recipe) == expected
        assert_same_state(optimizer, expected_optimizer)


def fails_on_one(rank: int, size: int, path: str) -> str:
    """The disk of rank 0 breaks during a step; the other rank must not wait for ever."""
    fail = [False]

    def write(descriptor: int, memories: Sequence[memoryview], offset: int) -> int:
        if fail[0]:
            raise OSError(5, os.strerror(5))
        return os.pwritev(descriptor, memories, offset)

    offload = on(path)
    if rank == 0:
        offload.tiers.calls = Calls(pwritev=write)
    model = sharded_toy(offload)
    optimizer = offload.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(model, optimizer, rank, Recipe(steps=2))
    fail[0] = True
    begin = time.monotonic()
    try:
        train(model, optimizer, rank, Recipe(steps=2, schedule=False))
    except (StorageError, PeerError) as error:
        if rank == 0:  # as a process that ends: its peers' transfers fail
            torch.distributed.destroy_process_group()
        assert time.monotonic() - begin < 40
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing failed")


def test_all_ranks_hear_of_a_broken_disk(world2: World, tmp_path: Path) -> None:
    try:
        first, second = world2.run(fails_on_one, str(tmp_path))
    finally:
        world2.close()  # the process group of rank 0 is gone
    assert re.search("^StorageError: rank 0: writing optimizer state .*failed: Input/output", first)
    assert re.search(r"^PeerError: .*rank 0 failed .*writing optimizer state", second)
    assert list(tmp_path.iterdir()) == []


def no_room_on_one(rank: int, size: int, path: str) -> str:
    folder = Path(path) / "nowhere" if rank == 0 else Path(path)
    offload = on(path, params="disk", disk=DiskSettings(path=folder))
    try:
        model = sharded_toy(offload)
        loss_of(model, tokens_for(0, rank))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing failed")


def test_all_ranks_hear_of_a_disk_that_cannot_be_used(world2: World, tmp_path: Path) -> None:
    first, second = world2.run(no_room_on_one, str(tmp_path))
    assert "StorageError: rank 0: creating a file for parameters" in first
    assert "rank 0 failed while planning: StorageError: rank 0" in second


def evaluates_between(rank: int, size: int, path: str, checksums: bool = False) -> None:
    """Prefetched shards are not taken for fresh after a step, a load or a write."""
    models = []
    disk = DiskSettings(path=Path(path), checksums=checksums)
    for offload in (None, on(path, params="disk", disk=disk)):
        model = sharded_toy(offload)
        optimizer = wrapped(torch.optim.AdamW(model.parameters(), lr=1e-2), offload)
        start = {k: v.clone() for k, v in model.state_dict().items()}
        losses = []
        for turn in range(4):
            train(model, optimizer, rank, Recipe(steps=2, schedule=False))
            with torch.no_grad():
                losses.append(float(loss_of(model, tokens_for(7, rank))))
                model.head.weight.mul_(0.9)
                losses.append(float(loss_of(model, tokens_for(7, rank))))
            if turn == 2:
                model.load_state_dict(start)
                with torch.no_grad():
                    losses.append(float(loss_of(model, tokens_for(7, rank))))
        models.append((model, losses))
    assert models[0][1] == models[1][1]
    assert_same_values(models[0][0], models[1][0])


def test_what_users_write_is_seen(world2: World, tmp_path: Path) -> None:
    world2.run(evaluates_between, str(tmp_path))
    world2.run(evaluates_between, str(tmp_path), True)  # nor for corrupted


def test_state_that_settings_bring_later_is_moved(tmp_path: Path) -> None:
    """SGD has none before its momentum is switched on."""
    offload = on(str(tmp_path))
    params, plain = parameters(), parameters()
    ours = offload.wrap(torch.optim.SGD(params, 0.1))
    theirs = torch.optim.SGD(plain, 0.1)
    for step in range(4):
        for optimizer, given in ((ours, params), (theirs, plain)):
            give_gradients(given)
            if step == 1:
                optimizer.param_groups[0]["momentum"] = 0.9
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
    slots = ours._polyshard_offload.offload.state.slots  # type: ignore[attr-defined]
    assert not any(slot.in_runs for slot in slots)
