"""Steps that failed and were undone, beside every plugin at once: training is bitwise the same."""

from __future__ import annotations

import pytest
import torch
from sharded import Sharded, digest
from test_composition import is_chosen

import polyshard_resilience
from composition_table import CELLS, Cell
from polyshard_resilience.errors import AttemptError
from polyshard_testing import World

STEPS = 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One cell of every stack of several plugins: four ranks with replicas, ``bfloat16``."""
    if "cell" in metafunc.fixturenames:
        cells = [
            cell
            for cell in CELLS
            if cell.feature == "plain" and cell.dtype == "bf16" and cell.layout.replicas > 1
        ]
        chosen = [c for c in cells if len(c.stack) > 1 and is_chosen(c, metafunc.config)]
        metafunc.parametrize("cell", chosen, ids=[cell.id for cell in chosen])


def train(rank: int, size: int, cell: Cell, folder: str, fails: bool) -> str:
    """A digest of all tensors; with ``fails`` every rank in turn fails before each step.

    Not in the forward: ranks of tensor parallelism would wait for it in a process group of theirs,
    which has to be broken then, and does not come back.
    """
    torch.manual_seed(rank)
    trainee = Sharded(cell, folder)
    for step in range(STEPS):
        for failing in range(size if fails else 0):
            with pytest.raises(AttemptError, match=rf"rank {failing}: ValueError: deliberate"):
                _step(trainee, step, failing if rank == failing else -1)
        _step(trainee, step)
    return digest(trainee.tensors())


def _step(trainee: Sharded, step: int, failing: int = -1) -> None:
    with polyshard_resilience.attempt(trainee.model, trainee.optimizer):
        trainee.backward(step, 1, last=True)
        if failing % 2 == 0:
            _fail()
        trainee.step()
        if failing > 0:
            _fail()


def _fail() -> None:
    raise ValueError("deliberate")


def test_failures_change_nothing(cell: Cell, world4: World, tmp_path: object) -> None:
    wanted = world4.run(train, cell, f"{tmp_path}", False, timeout=120.0)
    assert world4.run(train, cell, f"{tmp_path}", True, timeout=120.0) == wanted
