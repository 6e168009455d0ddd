"""Steps taken while backward runs: the same bits, or an error on every rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offload_toys import (
    Recipe,
    assert_same_state,
    assert_same_values,
    same_as_without,
    sharded_toy,
    tokens_for,
    train,
    without,
    wrapped,
)
from torch import nn
from toy_meeting import await_all
from toy_models import loss_of

from polyshard import clip_grad_norm_, fully_shard
from polyshard.errors import SettingError
from polyshard_offload import DiskSettings, Offload, OffloadError
from polyshard_testing import World, raises_in_step, ranks

TIERS = [
    ("device", "host"),
    ("device", "disk"),
    ("host", "host"),
    ("host", "disk"),
    ("disk", "disk"),
]


def make(tiers: tuple[str, str], path: str, **chosen: Any) -> Offload:
    settings = {"chunk_bytes": 2000, "disk": DiskSettings(path=Path(path)), **chosen}
    return Offload(params=tiers[0], optimizer=tiers[1], step_in_backward=True, **settings)  # type: ignore[arg-type]


RECIPES = {
    "AdamW": Recipe(),
    "momentum": Recipe(optimizer="momentum"),
    "fused": Recipe(optimizer="fused", steps=5),
    "counter in groups": Recipe(optimizer="RowNorm", steps=5),
    "accumulation": Recipe(micro_batches=3, steps=5),
    "bf16 and replicas": Recipe(bf16=True, hsdp=True),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RECIPES)
def test_the_same_training(world2: World, name: str, tmp_path: Path) -> None:
    for tiers in TIERS if name == "AdamW" else (TIERS[1], TIERS[4]):
        world2.run(same_as_without, make(tiers, str(tmp_path)), RECIPES[name])


def test_the_same_training_over_replicas(world4: World, tmp_path: Path) -> None:
    world4.run(same_as_without, make(TIERS[4], str(tmp_path)), Recipe(hsdp=True, steps=5))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chosen", [{"prefetch": 0}, {"chunk_bytes": 1 << 20}, {"fraction": 0.4}])
def test_however_it_is_cut(world2: World, chosen: dict[str, Any], tmp_path: Path) -> None:
    for tiers in (TIERS[1], TIERS[4]):
        world2.run(same_as_without, make(tiers, str(tmp_path), **chosen), Recipe(steps=5))


@ranks(2)
def test_gradients_are_freed_group_by_group(rank: int, size: int) -> None:
    """When backward returns, everything is stepped and no gradient has memory any more."""
    offload = Offload(params="host", step_in_backward=True)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    for layer in model:
        fully_shard(layer, plugins=[offload])
    fully_shard(model, plugins=[offload])
    optimizer = offload.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    before = [p.detach().full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    for _ in range(3):
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gradients = offload.tiers.arenas["gradients", torch.float32]
    assert gradients.peak_bytes == 64 * 64 * 4 // size  # of one layer, not of eight
    assert gradients.taken_bytes == 0
    predicted, measured = offload.memory(optimizer), offload.measured_memory(optimizer)
    assert measured.host == predicted.host
    model(torch.ones(2, 64)).square().sum().backward()
    now = [p.detach().full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    assert all(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert all("SpentGradient" in repr(p.grad) for p in model.parameters())


# What cannot work is an error, on every rank ---------------------------------------------------


def trained(rank: int, path: str, tiers: tuple[str, str] = TIERS[1]) -> tuple[Any, Any]:
    offload = make(tiers, path)
    model = sharded_toy(offload)
    optimizer = offload.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(model, optimizer, rank, Recipe(steps=2, schedule=False))
    loss_of(model, tokens_for(50, rank)).backward()
    return model, optimizer


@ranks(2)
def test_looking_at_gradients_is_refused(rank: int, size: int, tmp_path: Path) -> None:
    path = str(tmp_path)
    model, optimizer = trained(rank, path)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for use in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: optimizer.zero_grad(set_to_none=False),
        model.head.weight.grad.full_tensor,
        model.head.weight.grad.to_local,
        lambda: model.head.weight.grad + 1,
    ):
        with pytest.raises(OffloadError, match=r"this gradient is gone.*step_in_backward=False"):
            use()
    optimizer.step()
    with raises_in_step(OffloadError, r"call optimizer\.zero_grad\(\) after every step"):
        loss_of(model, tokens_for(51, rank)).backward()
    model.reset_iter_state()
    optimizer.zero_grad()


@ranks(2)
def test_sums_over_reductions_are_refused(rank: int, size: int, tmp_path: Path) -> None:
    """A second synchronised micro-batch, with and without the gradients of the first."""
    path = str(tmp_path)
    for forget in (False, True):
        model, optimizer = trained(rank, path)
        if forget:
            optimizer.zero_grad()
        with raises_in_step(OffloadError, r"all but the last within no_sync\(\)"):
            loss_of(model, tokens_for(51, rank)).backward()
        model.reset_iter_state()


@ranks(2)
def test_settings_changed_before_the_step_are_refused(rank: int, size: int, tmp_path: Path) -> None:
    path = str(tmp_path)
    _, optimizer = trained(rank, path)
    # a rank still in its backward would be told there of another's refusal
    await_all("trained", size)
    optimizer.param_groups[0]["lr"] = 0.5
    with raises_in_step(OffloadError, r"'lr' of parameter group 0 was changed from 0\.01"):
        optimizer.step()


class Broken(nn.Module):
    """Raises in backward when told to, once all ranks have got there."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(self._backward)
        return x

    def _backward(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.fails:
            await_all("in backward", dist.get_world_size())
            raise RuntimeError("broken on purpose")
        return gradient


def backward(seed: int, model: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.rand(5, 6, generator=generator)).square().sum().backward()


def step(seed: int, model: Any, optimizer: Any) -> None:
    backward(seed, model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("tiers", [TIERS[1], TIERS[4]], ids="-".join)
@ranks(2)
def test_a_backward_that_raises_needs_a_checkpoint(
    rank: int, size: int, tiers: tuple[str, str], tmp_path: Path
) -> None:
    """Half of the parameters are stepped when backward raises: only what was saved helps."""
    path = str(tmp_path)
    models = []
    for offload in (None, make(tiers, path)):
        torch.manual_seed(0)
        plugins = [offload] if offload else []
        model: Any = nn.Sequential(
            nn.Linear(6, 7), Broken(), nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        )
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, plugins=plugins)
        fully_shard(model, plugins=plugins)
        optimizer = wrapped(torch.optim.AdamW(model.parameters(), lr=0.1), offload)

        step(0, model, optimizer)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        state = copy.deepcopy(optimizer.state_dict())
        model[1].fails = True
        with pytest.raises(RuntimeError, match="broken on purpose"):
            backward(1, model)
        model[1].fails = False
        model.reset_iter_state()
        if offload is not None:
            with raises_in_step(OffloadError, "backward raised after the optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            # A rank that learned of the other's refusal above quotes it until the step is given up.
            with raises_in_step(OffloadError, "from the last checkpoint|stepped some parameters"):
                backward(1, model)
            model.reset_iter_state()
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        for seed in range(1, 4):
            step(seed, model, optimizer)
        models.append((model, optimizer))
    assert_same_values(models[0][0], models[1][0])
    assert_same_state(models[0][1], models[1][1])


@ranks(2)
def test_a_forward_that_raises_needs_nothing(rank: int, size: int, tmp_path: Path) -> None:
    path = str(tmp_path)
    plain, _, expected = without(rank, size, Recipe(steps=4))
    offload = make(TIERS[4], path)
    recipe = Recipe(steps=4)
    model: Any = sharded_toy(offload, recipe)
    optimizer = offload.wrap(recipe.make_optimizer(model))
    with raises_in_step(IndexError, "index"):
        model(torch.tensor([[1000]]))
    model.reset_iter_state()
    assert train(model, optimizer, rank, recipe) == expected
    assert_same_values(model, plain)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(SettingError, match="choose optimizer='host' or 'disk'"):
        Offload(step_in_backward=True)
    with pytest.raises(SettingError, match="choose grads='host'"):
        Offload(params="host", grads="disk", optimizer="disk", step_in_backward=True)
    with pytest.raises(SettingError, match="must be one of True, False"):
        Offload(step_in_backward="auto")  # type: ignore[arg-type]


# Without any process group ---------------------------------------------------------------------


def test_plain_parameters_and_late_groups(tmp_path: Path) -> None:
    """Torch calls the hooks there; parameters may be unfrozen, and groups be added."""
    found = []
    for offload in (None, make(("device", "disk"), str(tmp_path))):
        params = [nn.Parameter(torch.linspace(0, 1, 40).reshape(8, 5)) for _ in range(4)]
        params[1].requires_grad_(False)
        optimizer = wrapped(torch.optim.Adam(params[:3], lr=0.1), offload)
        for step in range(6):
            if step == 2:
                params[1].requires_grad_(True)
                optimizer.add_param_group({"params": params[3:], "lr": 0.01})
            sum((p * (i + step)).square().sum() for i, p in enumerate(params)).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        found.append((params, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert_same_state(found[0][1], found[1][1])


def _fail(gradient: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("broken on purpose")


def test_a_broken_backward_is_told_by_the_next(tmp_path: Path) -> None:
    """Also without a call of ``step()``, which another rank's failure may keep from a rank."""
    params = [nn.Parameter(torch.linspace(0, 1, 40).reshape(8, 5)) for _ in range(2)]
    optimizer = wrapped(torch.optim.Adam(params, lr=0.1), make(("device", "disk"), str(tmp_path)))

    def loss(*, fails: bool) -> torch.Tensor:
        last = params[0] * 2  # autograd begins with what was computed last
        if fails:
            last.register_hook(_fail)
        return last.sum() + params[1].square().sum()

    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="broken on purpose"):
        loss(fails=True).backward()
    optimizer.zero_grad()
    with pytest.raises(OffloadError, match=r"stepped some parameters.*from the last checkpoint"):
        loss(fails=False).backward()
    optimizer.load_state_dict(state)
    loss(fails=False).backward()
    optimizer.step()


@pytest.mark.parametrize("is_async", [False, True])
@ranks(2)
def test_gradients_that_land_after_all_backwards(
    rank: int, size: int, tmp_path: Path, is_async: bool
) -> None:
    """``finalize_backward()`` steps as a backward does."""

    def trained(*, early: bool) -> list[torch.Tensor]:
        disk = DiskSettings(path=tmp_path)
        offload = Offload(params="host", optimizer="disk", step_in_backward=early, disk=disk)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for module in (*model, model):
            fully_shard(module, plugins=[offload])
        model.set_manual_backward_finalization(True)
        optimizer = offload.wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(3):
            for is_last in (False, True):
                model.set_requires_gradient_sync(is_last)
                model(torch.ones(2, 8)).sum().backward()
            handle = model.finalize_backward(async_op=is_async)
            if handle is not None:
                handle.wait()
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor().detach() for p in model.parameters()]

    for ours, theirs in zip(trained(early=True), trained(early=False), strict=True):
        assert torch.equal(ours, theirs)
