"""The training itself, started by hand: what launchers are compared with, and how it leaves."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from launch_ranks import (
    MISTAKE,
    PAUSE,
    SCRIPT,
    STEPS,
    TRY_AGAIN,
    Outcome,
    Undisturbed,
    ask,
    by_hand,
    wait_for_step,
)
from torch.nn import functional


@pytest.fixture(scope="module")
def training() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("launch_train", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def alone(training: ModuleType) -> list[float]:
    """Losses of plain torch in this process, on all rows at once."""
    model = training.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        rows, classes = training.batch(step)
        loss = functional.cross_entropy(model(rows), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_are_those_of_one_process(
    ranks: int, alone: list[float], undisturbed: Undisturbed
) -> None:
    outcome = undisturbed(ranks)
    assert outcome.world_size == ranks
    assert outcome.starts == [(ranks, 0)]
    assert outcome.losses == pytest.approx(alone, rel=1e-4)
    assert outcome.losses[-1] < 0.8 * outcome.losses[0], "nothing was learned"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_asked_to_leave_all_save_and_go_on_later(
    number: signal.Signals, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """One rank is asked; both leave after the same step, which no regular save is due at."""

    def meanwhile(pids: list[int]) -> None:
        wait_for_step(tmp_path / "log", 7)
        ask(pids[1:], number)

    steps = f"--steps={STEPS}"
    codes = by_hand(2, tmp_path, steps, PAUSE, "--save-every=1000", meanwhile=meanwhile)
    assert codes == [TRY_AGAIN, TRY_AGAIN]
    assert not (tmp_path / "losses.json").exists()
    assert by_hand(2, tmp_path, steps) == [0, 0]
    outcome = Outcome.of(tmp_path)
    assert len(outcome.starts) == 2
    assert 7 <= outcome.starts[1][1] < STEPS
    assert outcome.losses == undisturbed(2).losses


def test_ranks_that_cannot_share_a_batch_are_refused(tmp_path: Path) -> None:
    assert by_hand(5, tmp_path) == [MISTAKE] * 5
    assert "5 ranks cannot share 96 rows evenly" in (tmp_path / "log").read_text()
