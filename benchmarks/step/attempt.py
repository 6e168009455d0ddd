"""What a step costs within ``polyshard_resilience.attempt``, beside the same step without.

    python -m benchmarks.step.attempt --tokens 512

The three take turns on the same ranks, model and data.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import polyshard
import polyshard_resilience
from benchmarks.harness import (
    Found,
    command,
    in_turns,
    median_of,
    paired,
    run_ranks,
    sharded,
    shards,
    slowest,
)
from polyshard_resilience.rollback.undo import memories_of

PLAIN, AGREED, COPIED = "without", "undo_steps=False", "undo_steps=True"


@dataclass(frozen=True)
class Case:
    """Bound by communication; with 512 tokens by computation."""

    ranks: int = 2
    width: int = 512
    tokens: int = 16
    turns: int = 15

    def quick(self) -> Case:
        return replace(self, width=64, turns=1)


def measure(case: Case) -> Found:
    """Medians of the slowest rank's seconds, ratios to the step without, and bytes on the host."""
    found: Found = run_ranks(case.ranks, _measure, case)
    return found


def _measure(case: Case) -> Found:
    torch.manual_seed(0)
    layers = [nn.Linear(case.width, case.width) for _ in range(8)]
    model = sharded(nn.Sequential(*layers), layers, polyshard.fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(case.tokens, case.width)
    attempt = partial(polyshard_resilience.attempt, model, optimizer)
    ways: dict[str, Callable[[], Any]] = {
        PLAIN: nullcontext,
        AGREED: partial(attempt, undo_steps=False),
        COPIED: attempt,
    }

    def step(way: Callable[[], Any]) -> None:
        with way():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    seconds = in_turns({n: slowest(partial(step, way)) for n, way in ways.items()}, case.turns)
    return {
        "seconds": median_of(seconds),
        "ratios": {name: paired(each, seconds[PLAIN]) for name, each in seconds.items()},
        "shard_bytes": sum(shard.nbytes for shard in shards(model)),
        "host_bytes": memories_of(model).nbytes,
    }


if __name__ == "__main__":
    command(measure, Case(), __doc__)
