"""What the guards of a run cost a step.

    python -m benchmarks.guards

Three copies of one model take turns on the same ranks and data: without guards, with `NonFinite`,
and with `Corruption` looking around every step. A look costs the same however rare it is, so what
it adds to a step at another `every` is that part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import polyshard
from benchmarks.harness import (
    Found,
    command,
    in_turns,
    language_model,
    loss_of,
    median_of,
    paired,
    run_ranks,
    sharded,
    shards,
    slowest,
)
from polyshard_resilience import Corruption, NonFinite
from polyshard_resilience.guards.corruption import EVERY

PLAIN, NON_FINITE, CORRUPTION = "no guard", "NonFinite", "Corruption, every=1"


@dataclass(frozen=True)
class Case:
    """What is measured."""

    ranks: int = 2
    width: int = 512
    tokens: int = 512
    turns: int = 15

    def quick(self) -> Case:
        return replace(self, width=64, tokens=16, turns=1)


class _Training:
    """One copy of the model and its optimizer, with the guard it is named after."""

    def __init__(self, name: str, case: Case) -> None:
        model = language_model(case.width, 8, case.tokens, 3 * case.width)
        self.model = sharded(model, model.blocks, polyshard.fully_shard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randint(0, 256, (1, case.tokens + 1))
        if name == NON_FINITE:
            NonFinite(self.optimizer)
        if name == CORRUPTION:
            Corruption(self.model, self.optimizer, every=1)

    def step(self) -> None:
        loss_of(self.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(case: Case) -> Found:
    """Medians in seconds, and what guards add as parts of a step; the slowest rank's of a turn."""
    found: Found = run_ranks(case.ranks, _measure, case)
    return found


def _measure(case: Case) -> Found:
    trainings = {name: _Training(name, case) for name in (PLAIN, NON_FINITE, CORRUPTION)}
    ways = {name: slowest(training.step) for name, training in trainings.items()}
    times = in_turns(ways, case.turns, warmup=2)  # the first two allocate, and open a window
    added = {name: paired(times[name], times[PLAIN]) - 1 for name in (NON_FINITE, CORRUPTION)}
    added[f"Corruption, every={EVERY}"] = added[CORRUPTION] / EVERY
    plain = trainings[PLAIN]
    return {
        "ranks": case.ranks,
        "width": case.width,
        "tokens": case.tokens,
        "watched_bytes": sum(t.nbytes for t in shards(plain.model, plain.optimizer)),
        "step_seconds": median_of(times),
        "added_to_a_step": added,
    }


if __name__ == "__main__":
    command(measure, Case(), __doc__)
