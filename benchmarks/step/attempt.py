"""What a step costs within ``polyshard.attempt``, beside the same step without.

    python -m benchmarks.step.attempt

The three take turns on the same ranks, model and data, so that what else the machine does falls on
all of them alike; the ratios are medians of those of single turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import polyshard
from benchmarks.ranks import run_ranks
from polyshard.rollback.undo import memories_of

PLAIN, AGREED, COPIED = "without", "undo_steps=False", "undo_steps=True"


def measure(ranks: int, width: int, tokens: int, turns: int) -> dict[str, Any]:
    """Medians of the slowest rank's seconds, ratios to the step without, and bytes on the host."""
    found: dict[str, Any] = run_ranks(ranks, _measure, width, tokens, turns)
    return found


def _measure(width: int, tokens: int, turns: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    for layer in model:
        polyshard.fully_shard(layer)
    polyshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ways: dict[str, Callable[[], Any]] = {
        PLAIN: nullcontext,
        AGREED: lambda: polyshard.attempt(model, optimizer, undo_steps=False),
        COPIED: lambda: polyshard.attempt(model, optimizer),
    }
    x = torch.randn(tokens, width)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):  # the first allocates
        for name, way in ways.items():
            spent = _slowest(partial(_step, model, optimizer, x, way))
            if turn:
                seconds[name].append(spent)
    ratios = {
        name: statistics.median(s / p for s, p in zip(each, seconds[PLAIN], strict=True))
        for name, each in seconds.items()
    }
    return {
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "ratios": ratios,
        "shard_bytes": sum(p.to_local().nbytes for p in model.parameters()),
        "host_bytes": memories_of(model).nbytes,
    }


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, way: Callable[[], Any]
) -> None:
    with way():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _slowest(work: Callable[[], None]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    spent = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def main() -> None:
    """Print both kinds of step: bound by communication, and by computation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    chosen = parser.parse_args()
    for width, tokens in ((512, 16), (512, 512)):
        print(width, tokens, measure(chosen.ranks, width, tokens, chosen.turns))


if __name__ == "__main__":
    main()
