"""What a step costs within ``polyshard_resilience.attempt``, beside the same step without.

    python -m benchmarks.step.attempt --tokens 512

The three take turns on the same ranks, model and data.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import polyshard_resilience
from benchmarks import harness
from benchmarks.harness import Found, OnRanks
from polyshard_resilience.rollback.undo import memories_of


@dataclass(frozen=True)
class Case(OnRanks, width=64, turns=1):
    """Bound by communication; with 512 tokens by computation."""

    width: int = 512
    tokens: int = 16
    turns: int = 15

    def on_rank(self) -> Found:
        """Median seconds of the slowest rank, ratios to the step without, bytes on the host."""
        training = harness.linear_training(self.width, 8, self.tokens, lr=1e-4)
        attempt = partial(polyshard_resilience.attempt, training.model, training.optimizer)

        def step(block: Any) -> None:
            with block():
                training.step()

        steps = {
            "without": partial(step, nullcontext),
            "undo_steps=False": partial(step, partial(attempt, undo_steps=False)),
            "undo_steps=True": partial(step, attempt),
        }
        times = harness.time_steps(steps, self.turns)
        return {
            "seconds": harness.median_of(times),
            "ratios": {n: harness.paired(each, times["without"]) for n, each in times.items()},
            "shard_bytes": harness.nbytes(harness.local(training.model.parameters())),
            "host_bytes": memories_of(training.model).nbytes,
        }


if __name__ == "__main__":
    harness.command(Case(), __doc__)
