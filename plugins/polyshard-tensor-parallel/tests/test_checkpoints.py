"""Checkpoints between factorisations of the same ranks, and into one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from toy_models import full
from tp_models import loss_of, meshes, mlp, mlp_plan, shard_blocks, tiny, tokens_for

from polyshard import fully_shard
from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_checkpoint.safetensors import load_safetensors, save_safetensors
from polyshard_tensor_parallel import TensorParallel, demo_plan
from polyshard_testing import World, ranks

LAYOUTS = {"2 x 2": (2, 2), "4 x 1": (4, 0), "1 x 4": (1, 4)}
"""Data-parallel and tensor-parallel ranks; 0 leaves the plugin out."""


def built(layout: str, seed: int = 0) -> tuple[Any, torch.optim.Optimizer, int]:
    """A model that another seed would have made different, its optimizer, and its batch."""
    dp, tp = LAYOUTS[layout]
    model: Any = tiny(seed=seed)
    if tp:
        mesh = meshes(dp, tp)
        plugin = TensorParallel(demo_plan(), mesh=mesh["tp"])
        plugin.apply(model)
        shard_blocks(model, mesh=mesh["dp"], plugins=[plugin])
    else:
        shard_blocks(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), max(1, tp)


def step(model: Any, optimizer: torch.optim.Optimizer, index: int) -> float:
    loss = loss_of(model, tokens_for(index, 0))  # the same batch everywhere: layouts agree on it
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("source", "target"),
    [("2 x 2", "4 x 1"), ("4 x 1", "2 x 2"), ("2 x 2", "1 x 4"), ("1 x 4", "2 x 2")],
)
@ranks(4)
def test_saved_on_one_layout_loaded_on_another(
    rank: int, size: int, tmp_path: Path, source: str, target: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    first, optimizer, _ = built(source)
    step(first, optimizer, 0)
    weights, moments = get_state_dict(first, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    expected = step(first, optimizer, 1), step(first, optimizer, 2)

    second, other, _ = built(target, seed=1)
    step(second, other, 7)  # so that the optimizer has state to fill
    weights, moments = get_state_dict(second, other)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    found = set_state_dict(
        second, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert not found.missing_keys
    losses = step(second, other, 1), step(second, other, 2)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


def full_state(rank: int, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer, _ = built("2 x 2")
    step(model, optimizer, 0)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    return weights, moments


def test_the_full_state_dict_is_that_of_one_process(world4: World) -> None:
    weights, moments = world4.run(full_state)[0]
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    assert list(weights) == list(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-4)
    expected: Any = get_optimizer_state_dict(model, optimizer)
    for name, values in expected["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            found = moments["state"][name][key]
            torch.testing.assert_close(found, values[key], rtol=1e-3, atol=1e-6)


@ranks(4)
def test_uneven_shards_are_saved_right(rank: int, size: int, tmp_path: Path) -> None:
    """Seven rows for each tensor-parallel rank, over two data-parallel ones."""
    folder = str(tmp_path / "checkpoint")
    mesh = meshes(2, 2)
    model = mlp(width=7, hidden=14)
    plugin = TensorParallel(mlp_plan(), mesh=mesh["tp"])
    plugin.apply(model)
    fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    dcp.save(model.state_dict(), checkpoint_id=folder)
    plain: Any = fully_shard(mlp(seed=1, width=7, hidden=14))
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=folder)
    plain.load_state_dict(state)
    for found, expected in zip(
        plain.parameters(), mlp(width=7, hidden=14).parameters(), strict=True
    ):
        assert torch.equal(full(found.detach()), expected.detach())


def run(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    model(torch.ones(2, 10)).sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hidden", [12, 10])
@ranks(4)
def test_a_run_on_two_axes_goes_on(rank: int, size: int, tmp_path: Path, hidden: int) -> None:
    """Shards of shards, evenly and not, in checkpoints and in safetensors files."""

    def start(seed: int) -> TrainingState:
        model: Any = mlp(seed, hidden=hidden)
        mesh = meshes(2, 2)
        plugin = TensorParallel(mlp_plan(), mesh=mesh["tp"])
        plugin.apply(model)
        fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
        return TrainingState(model, [torch.optim.AdamW(model.parameters(), lr=0.1)])

    state, other = start(0), start(1)
    trained = run(state.model, state.optimizers[0])
    Checkpoints(tmp_path / "run").save(1, state)
    save_safetensors(state.model, tmp_path / "weights")
    wanted = run(state.model, state.optimizers[0])
    Checkpoints(tmp_path / "run").load(other)
    found = run(other.model, other.optimizers[0])
    load_safetensors(other.model, tmp_path / "weights")
    loaded = {name: full(p.detach()) for name, p in other.model.named_parameters()}
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name
        assert torch.equal(loaded[name], trained[name]), name
