"""A training with ``attempt``: rank 1 raises in a step, and is killed in a later one.

Each rank has all weights (HSDP of one shard): what the survivor saves is complete, and the training
started again continues from there. Ranks write what they have come to into ``said-RANK``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import polyshard_resilience
from polyshard import fully_shard
from polyshard_checkpoint import Checkpoints, TrainingState, checkpoints_in
from polyshard_resilience.errors import AttemptError

SCRIPT = Path(__file__)
STEPS, RAISES, DIES = 8, 2, 5
TRY_AGAIN = 75


def train(out: Path, seconds: float) -> bool:
    """Train, and save what is left, which takes so many seconds; whether all steps were made."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints, state = Checkpoints(out / "checkpoints"), TrainingState(model, [optimizer])
    restored = checkpoints.load(state)
    first, said = restored.step + 1 if restored else 0, out / f"said-{rank}"
    say(said, f"starts with {first}")
    for step in range(first, STEPS):
        attempt = polyshard_resilience.attempt(model, optimizer)
        try:
            with attempt:
                model(torch.randn(6, 33)).square().mean().backward()
                if rank == 1 and step == RAISES:
                    raise ValueError("a broken sample")
                if rank == 1 and step == DIES and restored is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                attempt.ready()
                optimizer.step()
                optimizer.zero_grad()
        except AttemptError as error:
            say(said, f"{step} failed on {error.ranks}, {'gone' if error.is_gone else 'undone'}")
            if error.is_gone:
                time.sleep(seconds)
                checkpoints.save_survivors(step - 1, state)
                say(said, f"saved {step - 1}")
                return False
    say(said, "done")
    return True


def say(file: Path, line: str) -> None:
    """One line more, at once."""
    with file.open("a", encoding="utf-8") as text:
        text.write(line + "\n")


def check(out: Path, is_saved: bool) -> None:
    """Whether both ranks undid the step that failed, and the survivor of the other one saved it."""
    first, second = ((out / f"said-{rank}").read_text("utf-8").splitlines() for rank in (0, 1))
    undone = ["starts with 0", f"{RAISES} failed on (1,), undone"]
    assert second[:2] == undone
    assert first[:2] == undone
    said = [f"{DIES} failed on (1,), gone", f"saved {DIES - 1}"]
    assert first[2:4] == said if is_saved else said[1] not in first, first
    assert [saved.name for saved in checkpoints_in(out / "checkpoints")] == (
        [f"step-{DIES - 1:06}"] if is_saved else []
    )


def check_again(out: Path) -> None:
    """Whether ranks that were started again continued from there."""
    for rank in (0, 1):
        said = (out / f"said-{rank}").read_text("utf-8").splitlines()
        assert said[-2:] == [f"starts with {DIES}", "done"]


def main() -> None:
    """Be one rank: ``OUT SECONDS [--handle-sigterm]``."""
    if "--handle-sigterm" in sys.argv:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    polyshard_resilience.enable()
    dist.init_process_group("gloo")
    is_done = train(Path(sys.argv[1]), float(sys.argv[2]))
    os._exit(0 if is_done else TRY_AGAIN)  # where a rank has died, groups cannot be destroyed


if __name__ == "__main__":
    main()
