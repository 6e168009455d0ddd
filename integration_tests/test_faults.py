"""Every cell of the table of faults, on processes of its own."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.cells import run_cell
from faults.processes import Ranks
from torch import nn

from composition_table import PLUGINS
from fault_table import BAR_SECONDS, FAULT_CELLS, TIMEOUT_SECONDS, FaultCell
from polyshard import fully_shard
from polyshard.errors import PeerError
from subsets import stack_of

INSTALLED = {
    name for name in PLUGINS if importlib.util.find_spec(f"polyshard_{name.replace('-', '_')}")
}


def _has_device() -> bool:
    if importlib.util.find_spec("polyshard_sim") is None:
        return False
    from polyshard_sim import is_buildable

    return is_buildable()


HAS_DEVICE = _has_device()


def is_chosen(cell: FaultCell, config: pytest.Config) -> bool:
    """As for combinations; a sample of those with some of the plugins, unless all are asked for."""
    asked = config.getoption("--stack")
    if not (cell.is_brief or config.getoption("--all-faults")):
        return False
    if cell.device == "sim" and not HAS_DEVICE:
        return False
    return set(cell.stack) <= INSTALLED if asked is None else stack_of(cell.stack) == asked


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault" in metafunc.fixturenames:
        chosen = [cell for cell in FAULT_CELLS if is_chosen(cell, metafunc.config)]
        metafunc.parametrize("fault", chosen, ids=[cell.id for cell in chosen])


def test_fault(fault: FaultCell, tmp_path: Path) -> None:
    run_cell(fault, str(tmp_path))


def killed_early(rank: int, size: int) -> tuple[str, float]:
    """What rank 0 is told when rank 1 ends before the first forward; in the seconds it took."""
    model: Any = fully_shard(nn.Linear(4, 4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(PeerError) as caught:
        model(torch.ones(1, 4))
    return str(caught.value), time.monotonic() - begin


def test_a_rank_that_is_killed_before_plans_are_compared() -> None:
    answers = Ranks(2, TIMEOUT_SECONDS).run(killed_early, ended=[1])
    text, seconds = answers[0]
    assert "the first forward of their sharded model cannot begin, because rank 1 is gone" in text
    assert seconds < BAR_SECONDS
