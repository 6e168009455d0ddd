"""One training for every launcher: sharded, resumed by itself, and it saves when asked to leave.

The launcher of the ranks says in ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
``MASTER_PORT`` which is which, as torchrun does::

    torchrun --nproc-per-node=2 examples/launch/train.py --out=runs/launch

A rank that gets SIGUSR1 or SIGTERM has all ranks save after the step they are in, and exit with 75
("try again later", EX_TEMPFAIL of sysexits.h): started again, they continue. Losses of all steps
are in ``losses.json`` when all are done.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import polyshard_resilience
from polyshard import fully_shard
from polyshard_checkpoint import Checkpoints, TrainingState

ROWS = 96  # of a step's batch, on all ranks together
WIDTH, CLASSES = 33, 7
TRY_AGAIN = 75
MISTAKE = 64  # EX_USAGE: the same again would fail the same way
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Settings:
    """What a run is to do.

    Attributes:
        out: folder of this run, which all ranks see.
        steps: of the whole run, those before a restart included.
        save_every: so many steps.
        pause: seconds to wait in each step: time for something to go wrong.
    """

    out: Path
    steps: int = 40
    save_every: int = 5
    pause: float = 0.0


@dataclass
class History:
    """What has happened so far; saved with the weights, so that steps done twice count once."""

    losses: list[float] = field(default_factory=list)
    starts: list[dict[str, int]] = field(default_factory=list)
    """Number of ranks, and the first step, of every start that got as far as a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"losses": self.losses, "starts": self.starts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.losses, self.starts = state_dict["losses"], state_dict["starts"]


class Request:
    """Whether this process was asked to leave."""

    def __init__(self) -> None:
        self.is_there = False
        # Where a launcher runs this in a thread (Ray), signals are not ours to take.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGUSR1, signal.SIGTERM):
                signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.is_there = True


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        """``[rows, WIDTH]`` to the same."""
        out: Tensor = rows + self.down(functional.gelu(self.up(self.norm(rows))))
        return out


def build() -> nn.Sequential:
    """The model, with the same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Rows of all ranks ``[ROWS, WIDTH]`` and their classes ``[ROWS]``: they depend on the step."""
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return rows, rows[:, :CLASSES].argmax(1)


def device() -> torch.device:
    """This rank's accelerator, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def train(settings: Settings) -> bool:
    """Train within the process group that is there; whether all steps are done.

    If not, a rank was asked to leave, and the state of the run is saved.
    """
    rank, ranks, here = dist.get_rank(), dist.get_world_size(), device()
    if ROWS % ranks:
        print(
            f"{ranks} ranks cannot share {ROWS} rows evenly; start a divisor of them.", flush=True
        )
        sys.exit(MISTAKE)
    torch.set_num_threads(1)  # kernels cut work by threads, and launchers give other numbers
    model = build().to(here)
    mesh = init_device_mesh(here.type, (ranks,))
    for block in list(model)[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = History()
    state = TrainingState(model, [optimizer], shared={"history": history})
    with Checkpoints(settings.out / "checkpoints") as checkpoints:
        restored = checkpoints.load(state)
        first = restored.step + 1 if restored else 0
        if rank == 0:
            print(f"{ranks} ranks, going on with step {first}", flush=True)
        history.starts.append({"ranks": ranks, "step": first})
        request = Request()  # not earlier: until here nothing is lost
        for step in range(first, settings.steps):
            rows, classes = (part.chunk(ranks)[rank].to(here) for part in batch(step))
            loss = functional.cross_entropy(model(rows), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(settings.pause)
            mean, leaves = together(loss, request)
            history.losses.append(mean)
            if rank == 0:
                print(f"step {step + 1}/{settings.steps}: loss {mean!r}", flush=True)
            is_last = step + 1 == settings.steps
            if is_last or leaves or (step + 1) % settings.save_every == 0:
                checkpoints.save(step, state)
            if leaves and not is_last:
                return False
    if rank == 0:
        done = {"world_size": ranks, **history.state_dict()}
        (settings.out / "losses.json").write_text(json.dumps(done, indent=1))
    return True


def together(loss: Tensor, request: Request) -> tuple[float, bool]:
    """The mean of the ranks' losses, rounded once, and whether any of them was asked to leave."""
    own = torch.stack([loss.detach().double(), loss.new_tensor(request.is_there).double()])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    losses, requests = torch.stack(every).T.tolist()
    return math.fsum(losses) / len(losses), any(requests)


def settings_of(line: list[str] | None = None) -> Settings:
    """Settings from the command line."""
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--out", type=Path, required=True, help="folder that all ranks see")
    flags.add_argument("--steps", type=int, default=Settings.steps)
    flags.add_argument("--save-every", type=int, default=Settings.save_every)
    flags.add_argument("--pause", type=float, default=Settings.pause, help="seconds in each step")
    return Settings(**vars(flags.parse_args(line)))


def main() -> None:
    """Be one rank."""
    settings = settings_of()
    backend = "gloo" if device().type == "cpu" else "cpu:gloo,cuda:nccl"
    polyshard_resilience.enable()
    dist.init_process_group(backend, timeout=TIMEOUT)
    is_done = train(settings)
    dist.destroy_process_group()
    sys.exit(0 if is_done else TRY_AGAIN)


if __name__ == "__main__":
    main()
