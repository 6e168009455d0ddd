"""A training with ``attempt``: rank 1 raises in a step, and is killed in a later one.

Each rank has all weights (HSDP of one shard), so that the survivor's checkpoint is complete. What
it got to is in ``survived``, whose last word is the step that it saved.
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
from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_resilience.errors import AttemptError

STEPS, RAISES, DIES = 8, 2, 5
TRY_AGAIN = 75


def train(out: Path, delay: float = 0.0) -> bool:
    """Train, and save after ``delay`` seconds what is left; whether all steps were made."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints, state = Checkpoints(out / "checkpoints"), TrainingState(model, [optimizer])
    restored = checkpoints.load(state)
    said = out / f"said-{rank}"
    say(said, f"starts with {restored.step + 1 if restored else 0}")
    for step in range(restored.step + 1 if restored else 0, STEPS):
        attempt = polyshard_resilience.attempt(model, optimizer)
        try:
            with attempt:
                model(torch.randn(6, 33)).square().mean().backward()
                if rank == 1 and step == RAISES:
                    raise ValueError("a broken sample")
                if rank == 1 and step == DIES and restored is None:
                    (out / "killed").write_text(str(time.time()), encoding="utf-8")
                    os.kill(os.getpid(), signal.SIGKILL)
                attempt.ready()
                optimizer.step()
                optimizer.zero_grad()
        except AttemptError as error:
            say(said, f"{step} failed on {error.ranks}, {'gone' if error.is_gone else 'undone'}")
            if error.is_gone:
                time.sleep(delay)
                checkpoints.save_survivors(step - 1, state)
                say(said, f"saved {step - 1}")
                return False
    say(said, "done")
    return True


def say(file: Path, line: str) -> None:
    """One line more, at once."""
    with file.open("a", encoding="utf-8") as text:
        text.write(line + "\n")


def main() -> None:
    """Be one rank."""
    if "--ignore-sigterm" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    polyshard_resilience.enable()
    dist.init_process_group("gloo")
    is_done = train(Path(sys.argv[1]), float(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0 if is_done else TRY_AGAIN)


if __name__ == "__main__":
    main()
