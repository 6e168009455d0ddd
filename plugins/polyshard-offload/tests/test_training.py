"""Training with offload is bitwise training without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_toys import SMALL, TIERS, Recipe, same, same_as_without, values, wrapped
from torch import Tensor, nn

from polyshard import fully_shard
from polyshard_offload import DiskSettings, Offload
from polyshard_testing import World


def make(tiers: tuple[str, str, str], path: str, **settings: object) -> Offload:
    params, grads, optimizer = tiers
    chosen = {"chunk_bytes": SMALL, "disk": DiskSettings(path=Path(path)), **settings}
    return Offload(params=params, grads=grads, optimizer=optimizer, **chosen)  # type: ignore[arg-type]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_every_combination_of_tiers(
    world2: World, tiers: tuple[str, str, str], tmp_path: Path
) -> None:
    """Over 20 steps; the model has frozen, shared, unused, zero-size and 0-dim parameters."""
    world2.run(same_as_without, make(tiers, str(tmp_path)), Recipe(clip=0.1))
    every = Recipe(clip=0.1, micro_batches=2, bf16=True, hsdp=True)
    world2.run(same_as_without, make(tiers, str(tmp_path)), every)
    assert list(tmp_path.iterdir()) == []


RECIPES = {
    "accumulation": Recipe(steps=4, micro_batches=3, clip=0.1),
    "accumulation with reductions": Recipe(steps=4, micro_batches=3, sync_every=True, clip=0.1),
    "kept gradients": Recipe(steps=4, keep_gradients=True),
    "bf16": Recipe(steps=4, bf16=True, clip=0.1),
}
FAR = [("device", "device", "disk"), ("host", "host", "host"), ("disk", "disk", "disk")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tiers", FAR, ids="-".join)
@pytest.mark.parametrize("name", RECIPES)
def test_every_way_to_train(
    world2: World, tiers: tuple[str, str, str], name: str, tmp_path: Path
) -> None:
    world2.run(same_as_without, make(tiers, str(tmp_path)), RECIPES[name])


OPTIMIZERS = [
    "fused", "foreach", "amsgrad", "SGD", "momentum", "RMSprop", "Adagrad", "NAdam",
    "RowNorm",
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("tiers", [FAR[0], ("disk", "host", "disk")], ids="-".join)
def test_any_optimizer(
    world2: World, tiers: tuple[str, str, str], optimizer: str, tmp_path: Path
) -> None:
    recipe = Recipe(steps=4, optimizer=optimizer)
    world2.run(same_as_without, make(tiers, str(tmp_path)), recipe)


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_any_fraction(world2: World, fraction: float, tmp_path: Path) -> None:
    for tiers in (FAR[0], ("disk", "host", "disk")):
        offload = make(tiers, str(tmp_path), fraction=fraction)
        world2.run(same_as_without, offload, Recipe(steps=4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_any_depth(world2: World, prefetch: int, tmp_path: Path) -> None:
    for tiers in (FAR[0], FAR[2]):
        offload = make(tiers, str(tmp_path), prefetch=prefetch)
        world2.run(same_as_without, offload, Recipe(steps=4))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RECIPES)
def test_checksums_see_no_ghosts(world2: World, name: str, tmp_path: Path) -> None:
    """Clipping, accumulation and windows write too; none of it is taken for corruption."""
    disk = DiskSettings(path=tmp_path, checksums=True)
    for tiers in (("disk", "disk", "disk"), ("host", "disk", "disk")):
        world2.run(same_as_without, make(tiers, str(tmp_path), disk=disk), RECIPES[name])


def test_uneven_ranks(world4: World, tmp_path: Path) -> None:
    """Nothing divides by four here, and the last rank has nothing of some parameters."""
    for tiers in FAR:
        world4.run(same_as_without, make(tiers, str(tmp_path)), Recipe(steps=4, clip=0.1))


class Between(nn.Module):
    """A parameter without elements, which rests nowhere, between two of the first shard."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4, 3))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.second = nn.Parameter(torch.ones(5, 3))
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.cat((self.first, self.empty, self.second)) @ self.inner(x)
        return out


def nothing_between(rank: int, size: int, offload: Offload) -> None:
    found = []
    for plugin in (None, offload):
        torch.manual_seed(0)
        model: Any = Between()
        plugins = [] if plugin is None else [plugin]
        fully_shard(model.inner, plugins=plugins)
        fully_shard(model, plugins=plugins)
        optimizer = wrapped(torch.optim.AdamW(model.parameters(), lr=0.1), plugin)
        for step in range(3):
            model(torch.full((3,), float(rank + step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(model))
    assert all(same(found[0][name], value) for name, value in found[1].items())


def test_parameters_that_rest_nowhere_come_between_others(world2: World, tmp_path: Path) -> None:
    for settings in ({}, {"grads": "host", "step_in_backward": True}):
        tiers = ("disk", str(settings.pop("grads", "disk")), "disk")
        world2.run(nothing_between, make(tiers, str(tmp_path), **settings))


def test_worlds_of_one(world2: World, tmp_path: Path) -> None:
    for tiers in FAR:
        recipe = Recipe(steps=4, clip=0.1, alone=True)
        world2.run(same_as_without, make(tiers, str(tmp_path)), recipe)
        world2.run(same_as_without, make(tiers, str(tmp_path)), replace(recipe, bf16=True))


def test_replicas(world4: World, tmp_path: Path) -> None:
    for tiers in FAR:
        offload = make(tiers, str(tmp_path))
        world4.run(same_as_without, offload, Recipe(steps=4, clip=0.1, hsdp=True))
