"""What the guards of a run cost a step.

    python -m benchmarks.guards.cost

Three copies of one model take turns on the same ranks and data: without guards, with `NonFinite`,
and with `Corruption` looking around every step. A look costs the same however rare it is, so what
it adds to a step at another `every` is that part of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import polyshard
from benchmarks.ranks import run_ranks
from benchmarks.result import save
from polyshard.guards import Corruption, NonFinite
from polyshard.guards.corruption import EVERY
from polyshard_demo.model import LanguageModel, ModelSettings

PLAIN, NON_FINITE, CORRUPTION = "no guard", "NonFinite", "Corruption, every=1"
DEFAULT = f"Corruption, every={EVERY}"


def measure(ranks: int, width: int, tokens: int, turns: int) -> dict[str, Any]:
    """Medians in seconds, and what guards add as parts of a step; the slowest rank's of a turn."""
    found: dict[str, Any] = run_ranks(ranks, _measure, width, tokens, turns)
    return found


class _Training:
    """One copy of the model and its optimizer, with the guard it is named after."""

    def __init__(self, name: str, width: int, tokens: int) -> None:
        torch.manual_seed(0)
        settings = ModelSettings(
            width=width, layers=8, heads=max(width // 64, 1), hidden=3 * width, sequence=tokens
        )
        self.model = LanguageModel(settings)
        for block in self.model.blocks:
            polyshard.fully_shard(block)
        polyshard.fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if name == NON_FINITE:
            NonFinite(self.optimizer)
        if name == CORRUPTION:
            Corruption(self.model, self.optimizer, every=1)

    def step(self, batch: Tensor) -> float:
        """Seconds of one step on ``batch`` (``[1, tokens + 1]``)."""
        dist.barrier()
        begin = time.perf_counter()
        logits = self.model(batch[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin


def _measure(width: int, tokens: int, turns: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainings = {n: _Training(n, width, tokens) for n in (PLAIN, NON_FINITE, CORRUPTION)}
    batch = torch.randint(0, 256, (1, tokens + 1))
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for turn in range(turns + 2):  # the first two allocate, and open a window
        for name, training in trainings.items():
            seconds = torch.tensor(training.step(batch))
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn > 1:
                times[name].append(float(seconds))
    medians = {name: statistics.median(values) for name, values in times.items()}
    added = {
        name: statistics.median(
            guarded / plain - 1 for guarded, plain in zip(values, times[PLAIN], strict=True)
        )
        for name, values in times.items()
        if name != PLAIN
    }
    added[DEFAULT] = added[CORRUPTION] / EVERY
    plain = trainings[PLAIN]
    return {
        "ranks": dist.get_world_size(),
        "width": width,
        "tokens": tokens,
        "watched_bytes": sum(t.nbytes for t in _shards(plain)),
        "step_seconds": medians,
        "added_to_a_step": added,
    }


def _shards(training: _Training) -> list[Tensor]:
    values: list[Any] = list(training.model.parameters())
    values += [v for state in training.optimizer.state.values() for v in state.values()]
    return [v.to_local() if isinstance(v, DTensor) else v for v in values]


def show(found: dict[str, Any]) -> None:
    mebibytes = found["watched_bytes"] / 2**20
    print(f"{found['ranks']} ranks, {found['tokens']} tokens, {mebibytes:.0f} MiB watched a rank")
    print(f"{PLAIN:>20}: {1e3 * found['step_seconds'][PLAIN]:.1f} ms a step")
    for name, part in found["added_to_a_step"].items():
        print(f"{name:>20}: {part:+.2%} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found = measure(options.ranks, options.width, options.tokens, options.turns)
    show(found)
    if options.json:
        save(found, options.json)


if __name__ == "__main__":
    main()
