"""Checkpoints are native: whatever the tier was, and whatever became of the process."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from offload_toys import Recipe, on, sharded_toy, tokens_for, train, values, wrapped
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from toy_models import loss_of

from polyshard_testing import World, ranks
from polyshard_testing.world import RankError


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


@pytest.mark.thorough
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
    dist.barrier()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        train(model, optimizer, 0, recipe, range(4))


def test_checkpoints_outlive_a_kill(world2: World, tmp_path: Path) -> None:
    """SIGKILL in the middle of training leaves no swap files, and what was saved loads."""
    swap = tmp_path / "swap"
    swap.mkdir()
    expected = world2.run(saves, str(swap), str(tmp_path / "saved"), KINDS[0])
    with pytest.raises(RankError, match="ended without an answer"):
        world2.run(trains_until_killed, str(swap), KINDS[0])
    assert not list(swap.iterdir())
    assert world2.run(resumes, str(swap), str(tmp_path / "saved"), KINDS[0]) == expected


@pytest.mark.parametrize("tier", ["host", "disk"])
@ranks(2)
def test_parameters_are_saved_alone(rank: int, size: int, tmp_path: Path, tier: str) -> None:
    """A parameter or a gradient that is saved or copied carries itself and nothing else."""
    path = str(tmp_path)
    recipe, offload = Recipe(schedule=False), on(path, optimizer="host", params=tier)
    plain, model = sharded_toy(None, recipe), sharded_toy(offload, recipe)
    for each in (plain, model):
        loss_of(each, tokens_for(0, rank)).backward()
    expected, state = plain.state_dict(), model.state_dict()
    for name, parameter in model.named_parameters():
        for value in (parameter, parameter.grad):
            local: Any = None if value is None else value.to_local()  # type: ignore[attr-defined]
            if local is not None:
                assert local.storage_offset() == 0, name
                assert local.untyped_storage().nbytes() == local.nbytes, name
        buffer, reference = io.BytesIO(), io.BytesIO()
        torch.save(state[name], buffer)
        torch.save(expected[name], reference)
        assert buffer.tell() <= reference.tell() + 64, name
    whole = io.BytesIO()
    torch.save(state, whole)
    whole.seek(0)
    loaded = torch.load(whole, weights_only=True)
    for copied in (loaded, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        for name, value in copied.items():
            assert torch.equal(value.to_local().cpu(), expected[name].to_local().cpu()), name


@pytest.mark.parametrize("tier", ["host", "disk"])
@ranks(2)
def test_weights_swapped_out_are_kept(rank: int, size: int, tmp_path: Path, tier: str) -> None:
    """What other weights were swapped in for is not written over, and follows when it is back."""
    path = str(tmp_path)
    recipe, offload = Recipe(schedule=False), on(path, optimizer="host", params=tier)
    model, other = sharded_toy(offload, recipe), sharded_toy(None, recipe, seed=1)
    first, second = values(model), values(other)
    kept = model.state_dict()
    model.load_state_dict({n: v.clone() for n, v in other.state_dict().items()}, assign=True)
    with torch.no_grad():
        assert torch.equal(loss_of(model, tokens_for(0, 0)), loss_of(other, tokens_for(0, 0)))
    for name, value in ((n, v) for n, v in kept.items() if n in first):
        assert torch.equal(value.full_tensor(), first[name]), name
    assert all(torch.equal(value, second[name]) for name, value in values(model).items())
    model.load_state_dict(kept, assign=True)
    cached = model.state_dict()
    optimizer = wrapped(recipe.make_optimizer(model), offload)
    train(model, optimizer, rank, recipe, range(2))
    for name, value in model.state_dict().items():
        assert torch.equal(cached[name].to_local(), value.to_local()), name


@pytest.mark.parametrize("tier", ["host", "disk"])
@ranks(2)
def test_state_dicts_taken_early_follow(rank: int, size: int, tmp_path: Path, tier: str) -> None:
    """A state dict taken after ``to_empty``, or in the middle of loading, follows the model."""
    path = str(tmp_path)
    recipe, source = Recipe(schedule=False), sharded_toy(None)
    given = {n: v.clone() for n, v in source.state_dict().items()}
    for pieces in (False, True):
        offload = on(path, optimizer="host", params=tier)
        with torch.device("meta"):
            model = sharded_toy(offload, recipe)
        cached: dict[str, Any] = {}
        if pieces:
            for name, value in given.items():
                model.load_state_dict({name: value}, strict=False, assign=True)
                cached[name] = model.state_dict()[name]
        else:
            model.to_empty(device=torch.get_default_device())
            cached = model.state_dict()
            model.load_state_dict(given)
        optimizer = wrapped(recipe.make_optimizer(model), offload)
        train(model, optimizer, rank, recipe, range(2))
        for name, value in model.state_dict().items():
            assert torch.equal(cached[name].to_local(), value.to_local()), (name, pieces)
