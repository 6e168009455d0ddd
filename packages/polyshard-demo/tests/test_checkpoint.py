"""A checkpoint that was written to harm whoever resumes from it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from toy_models import build, shard
from toy_pickles import Call, make

from polyshard import fully_shard
from polyshard.testing import World
from polyshard_demo.checkpoint import Checkpoints
from polyshard_demo.errors import DemoError


def refuses(rank: int, size: int, folder: str, victim: str) -> None:
    model = shard(build(1), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(Path(folder), None)  # type: ignore[arg-type]
    with pytest.raises(DemoError, match=r"cannot load .*it names .*make"):
        checkpoints.load(Path(folder), model, optimizer)
    assert not Path(victim).exists()


def test_every_rank_of_the_demo_refuses(world2: World, tmp_path: Path) -> None:
    victim = tmp_path / "pwned"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(make, victim)))
    world2.run(refuses, str(tmp_path), str(victim))
