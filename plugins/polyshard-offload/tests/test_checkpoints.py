"""Checkpoints are native: whatever the tier was, and whatever became of the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from offload_toys import Recipe, on, sharded_toy, train, wrapped
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from polyshard.testing import World
from polyshard.testing.world import RankError


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def saves(rank: int, size: int, path: str, folder: str, tiers: tuple[str, str]) -> list[float]:
    """Four steps with offload, a checkpoint, four more steps; the losses of those."""
    offload = on(path, optimizer=tiers[1], params=tiers[0]) if tiers[0] else None
    recipe = Recipe(schedule=False)
    model = sharded_toy(offload, recipe)
    optimizer = wrapped(recipe.make_optimizer(model), offload)
    train(model, optimizer, 0, recipe, range(4))
    dcp.save(tensors_of(model, optimizer), checkpoint_id=folder)
    return train(model, optimizer, 0, recipe, range(4, 8))


def resumes(rank: int, size: int, path: str, folder: str, tiers: tuple[str, str]) -> list[float]:
    offload = on(path, optimizer=tiers[1], params=tiers[0]) if tiers[0] else None
    recipe = Recipe(schedule=False)
    model = sharded_toy(offload, recipe, seed=1)
    optimizer = wrapped(recipe.make_optimizer(model), offload)
    tensors = tensors_of(model, optimizer)
    # A fresh optimizer has state for parameters that were never used; the checkpoint has not.
    dcp.load(tensors, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=tensors["model"],
        optim_state_dict=tensors["optimizer"],
    )
    return train(model, optimizer, 0, recipe, range(4, 8))


KINDS = [("disk", "disk"), ("host", "host"), ("", "")]


def test_checkpoints_are_native(world2: World, tmp_path: Path) -> None:
    """Saved with one tier, loaded with another or with none: the same losses."""
    swap = tmp_path / "swap"
    swap.mkdir()
    for index, kind in enumerate(KINDS):
        folder = tmp_path / str(index)
        expected = world2.run(saves, str(swap), str(folder), kind)
        for other in KINDS:
            assert world2.run(resumes, str(swap), str(folder), other) == expected


def test_checkpoints_fit_other_worlds(world2: World, world4: World, tmp_path: Path) -> None:
    """All ranks see the same data here, so losses are close at any world size."""
    swap = tmp_path / "swap"
    swap.mkdir()
    expected = world2.run(saves, str(swap), str(tmp_path / "saved"), KINDS[0])[0]
    for kind in KINDS:
        found = world4.run(resumes, str(swap), str(tmp_path / "saved"), kind)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def trains_until_killed(rank: int, size: int, path: str, tiers: tuple[str, str]) -> None:
    """Reads and writes all the time, so it is in the middle of something when it is killed."""
    offload = on(path, optimizer=tiers[1], params=tiers[0])
    recipe = Recipe(schedule=False)
    model = sharded_toy(offload, recipe)
    optimizer = wrapped(recipe.make_optimizer(model), offload)
    (Path(path) / f"started-{rank}").touch()
    while True:
        train(model, optimizer, 0, recipe, range(4))


def test_checkpoints_outlive_a_kill(spare_world: World, world2: World, tmp_path: Path) -> None:
    """SIGKILL in the middle of training leaves no swap files, and what was saved loads."""
    swap = tmp_path / "swap"
    swap.mkdir()
    expected = spare_world.run(saves, str(swap), str(tmp_path / "saved"), KINDS[0])
    with pytest.raises(RankError, match="did not answer"):
        spare_world.run(trains_until_killed, str(swap), KINDS[0], timeout=3)  # killed after it
    assert sorted(p.name for p in swap.iterdir()) == ["started-0", "started-1"]
    assert world2.run(resumes, str(swap), str(tmp_path / "saved"), KINDS[0]) == expected
