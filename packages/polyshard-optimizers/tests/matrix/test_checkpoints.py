"""State lives with owners, and moves in checkpoints to other numbers of ranks and other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_models import Reference, Run, Shampoo, muon, shampoo
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_testing import World, ranks

PLUGINS = {"muon": (muon, torch.optim.Muon), "shampoo": (shampoo, Shampoo)}


def start(size: int, kind: str) -> tuple[Run, TrainingState]:
    run = Run(
        init_device_mesh(torch.get_default_device().type, (size,)), PLUGINS[kind][0](lr=0.002)
    )
    return run, TrainingState(run.model, [run.optimizer, run.rest], random=False)


def save(rank: int, size: int, kind: str, folder: Path) -> None:
    run, state = start(size, kind)
    run.train(0, 2)  # all ranks have the same batches, whatever their number
    Checkpoints(folder).save(2, state)


def go_on(rank: int, size: int, kind: str, folder: Path) -> None:
    run, state = start(size, kind)
    Checkpoints(folder).load(state)
    run.train(0, 2, 2)
    expected = Reference(1, PLUGINS[kind][1], {"lr": 0.002}).train(4).model
    run.check(expected, atol=2e-3 if kind == "muon" else 1e-5)  # averages of 3 equal terms round


@pytest.mark.parametrize("kind", PLUGINS)
def test_state_moves_to_another_number_of_ranks(
    world2: World, world3: World, tmp_path: Path, kind: str
) -> None:
    world2.run(save, kind, tmp_path)
    world3.run(go_on, kind, tmp_path)


@ranks(2)
def test_state_dicts_are_those_of_the_class_on_shards(rank: int, size: int) -> None:
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon())
    assert run.optimizer.state_dict()["state"] == {}
    run.train(rank, 2)
    state: dict[str, Any] = get_optimizer_state_dict(run.model, run.optimizer)
    reference = Reference(size).train(2)
    kept = dict(zip(reference.matrices, reference.matrices.values(), strict=True))
    assert set(state["state"]) == set(kept)
    for name, matrices in kept.items():
        (key,) = state["state"][name]
        moment = state["state"][name][key]
        assert key == "momentum_buffer"
        assert isinstance(moment, DTensor)
        parts = [reference.optimizer.state[m]["momentum_buffer"] for m in matrices]
        whole = moment.full_tensor()
        torch.testing.assert_close(whole, torch.cat(parts).view(whole.shape))
    other = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon())
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    other.model.load_state_dict(run.model.state_dict())
    other.train(rank, 1, 2)
    run.train(rank, 1, 2)
    run.check(reference.train(1, 2).model)
    for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())  # type: ignore[attr-defined]
