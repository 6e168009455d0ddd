"""Whole scripts: their diffs are those kept beside them, and losses before and after agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from migrate_runs import migrated
from torch import nn

from polyshard_cli.migrate import migrate_files
from polyshard_testing import World

SAMPLES = Path(__file__).parent / "samples"
SCRIPTS = sorted(path.stem for path in SAMPLES.glob("*_script.py"))


def run_script(rank: int, size: int, text: str) -> list[float]:
    """What the script's ``train`` returns on this rank."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, "script.py", "exec"), names)
    losses: list[float] = names["train"](rank)
    return losses


@pytest.mark.parametrize("name", SCRIPTS)
def test_diffs_are_those_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SAMPLES)
    document = migrate_files([Path(f"{name}.py")])
    assert document.files[0].diff == (SAMPLES / f"{name}.diff").read_text("utf-8")
    assert document.left == 0


@pytest.mark.parametrize(
    ("name", "tolerance"), [("fsdp2_script", 0.0), ("fsdp1_script", 1e-6), ("ddp_script", 1e-6)]
)
def test_losses_are_those_of_before(world2: World, name: str, tolerance: float) -> None:
    before = (SAMPLES / f"{name}.py").read_text("utf-8")
    after = migrated(before).text
    assert "torch.distributed.fsdp" not in after
    expected = world2.run(run_script, before)
    found = world2.run(run_script, after)
    assert expected[0] != expected[1]  # ranks have batches of their own
    for theirs, ours in zip(expected, found, strict=True):
        assert len(theirs) == 4
        assert ours == pytest.approx(theirs, rel=tolerance, abs=0.0)


DEEPSPEED = """
import deepspeed
import torch
from torch import nn

CONFIG = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}


def train(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    losses = []
    for step in range(4):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        loss = (engine(batch[rank::2]) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
"""


def test_a_deepspeed_loop_trains_as_one_process(world2: World) -> None:
    """A mean over ranks of means over halves is the mean of the whole batch."""
    found = migrated(DEEPSPEED)
    assert [term for _, term in found.left] == ["init_distributed"]  # the world has a group
    ranks = world2.run(run_script, found.text)
    means = [(a + b) / 2 for a, b in zip(*ranks, strict=True)]
    assert means == pytest.approx(alone(), rel=1e-5)


def alone() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


DIFFERENT = """
import torch
from torch.nn.parallel import DistributedDataParallel


def train(rank):
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    return [float(model(torch.ones(1, 3)).sum())]
"""


def test_ranks_that_relied_on_rank_0s_values_are_told(world2: World) -> None:
    """DDP sends them; without that ranks would train a mixture."""
    first, second = world2.run(run_script, DIFFERENT)
    assert first == second
    errors = world2.run(run_and_fail, migrated(DIFFERENT).text)
    assert all("weight" in error for error in errors)


def run_and_fail(rank: int, size: int, text: str) -> str:
    """The error that the script ends with on this rank."""
    from polyshard.errors import PlanMismatchError

    with pytest.raises(PlanMismatchError) as found:
        run_script(rank, size, text)
    return str(found.value)
