"""One rank of a replica group that may be killed: torchft counts groups, polyshard shards each.

A launcher starts one group as torchrun does, with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``; ``TORCHFT_LIGHTHOUSE`` is the same for all groups::

    export TORCHFT_LIGHTHOUSE=http://HOST:29510 # of `torchft_lighthouse --min_replicas=1`
    torchrun --nproc-per-node=2 --max-restarts=0 examples/replicas/train.py --group=0 --out=runs/r

A step is eight slots, which the groups share that are there: weights do not depend on how many
are, or when they were killed. Rank 0 writes each step to ``group-N.jsonl``, and at the end digests
of weights and optimizer state to ``final-N.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import polyshard_resilience
from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard_reproducible import Reproducible, SlotSampler, clip_grad_norm_
from polyshard_resilience import Replicas

SLOTS, BATCH, ROWS, WIDTH = 8, 3, 480, 33
TIMEOUT = timedelta(seconds=4)
"""Of what a killed group may keep waiting: connections to it, its word in a vote."""


@dataclass(frozen=True)
class Settings:
    """What a rank is to do.

    Attributes:
        out: folder of the run, which all groups see.
        group: number of this replica group.
        steps: of the whole run; 0 leaves it to the file ``stop`` in ``out``, which holds a number.
        pause: seconds to wait in each step: time for something to go wrong.
        seed: of the weights that a group begins with, if no other group has any.
    """

    out: Path
    group: int
    steps: int
    pause: float = 0.0
    seed: int = 0

    def is_over(self, number: int) -> bool:
        """Whether ``number`` steps are all."""
        steps = self.steps
        if not steps:
            stop = self.out / "stop"
            steps = int(stop.read_text("utf-8")) if stop.exists() else number + 1
        return number >= steps


class Block(nn.Module):
    """A residual layer of odd sizes, with dropout; its parameters make two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))

    def forward(self, rows: Tensor) -> Tensor:
        """``[rows, WIDTH]`` to the same."""
        hidden = self.drop(nn.functional.gelu(self.up(self.norm(rows))))
        out: Tensor = rows + self.down(hidden) * self.scale.float().mean()
        return out


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of the bits of weights and optimizer state, whole; all ranks of a group call it."""
    found = {}
    for name, parameter in model.named_parameters():
        values: dict[str, Any] = {"": parameter, **optimizer.state[parameter]}
        for key, value in values.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            raw = whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{name}.{key}"] = hashlib.blake2b(raw, digest_size=8).hexdigest()
    return found


class Log:
    """What rank 0 of a group writes of a run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._file = None
        if dist.get_rank() == 0:
            name = f"group-{settings.group}.jsonl"
            self._file = (settings.out / name).open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """One event."""
        if self._file is not None:
            self._file.write(json.dumps({"time": time.time(), **values}) + "\n")
            self._file.flush()

    def finish(self, found: dict[str, str]) -> None:
        """Digests at the end."""
        if self._file is not None:
            final = self._settings.out / f"final-{self._settings.group}.json"
            final.write_text(json.dumps(found), encoding="utf-8")


@contextmanager
def manager_of(settings: Settings) -> Iterator[Any]:
    """torchft's, of this rank."""
    import torchft

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        replica_id=f"group_{settings.group}",
    )
    yield manager
    manager.shutdown(wait=False)


def train(settings: Settings) -> None:
    """Train until the run is over, from what another group has, if one has anything."""
    if not dist.is_initialized():  # a launcher may have done it
        dist.init_process_group("gloo")
    polyshard_resilience.enable()  # so that ranks of a group notice each other's end
    log = Log(settings)
    torch.manual_seed(settings.seed)
    reproducible = Reproducible(slots=SLOTS)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))
    given: Any = {
        "plugins": [reproducible],
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    }
    for block in (model[0], model[1]):
        fully_shard(block, **given)
    fully_shard(model, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    sampler = SlotSampler(ROWS, BATCH, SLOTS, seed=1)
    with manager_of(settings) as manager:
        replicas = Replicas(manager, model, optimizer, also=[scheduler])
        log.write(event="ready")
        while not settings.is_over(manager.current_step()):
            with replicas.step() as step:
                number, others, losses = step.number, step.shared_slots, []
                for slot in reproducible.each_slot(model, step=number, replicas=others):
                    rows = data[sampler.indices(number, slot)]
                    losses.append((model(rows).mean(1) - rows.square().mean(1)).square().mean())
                    losses[-1].backward()
                loss = reproducible.mean(model, losses, replicas=others)
                clip_grad_norm_(model.parameters(), 1.0)
                time.sleep(settings.pause)
            if step.committed:
                scheduler.step()
            log.write(
                event="step",
                number=number,
                committed=step.committed,
                groups=others.size,
                loss=float(loss).hex(),
            )
        log.finish(digests(model, optimizer))
    dist.barrier()


def settings_of(description: str | None, line: list[str] | None = None) -> Settings:
    """Of the command line, or ``line``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    return Settings(**vars(parser.parse_args(line)))


def leave() -> None:
    """End this process, which has ended well: torchft's threads wait for their servers."""
    os._exit(0)


if __name__ == "__main__":
    train(settings_of(__doc__))
    leave()
