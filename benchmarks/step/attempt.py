"""What a step costs within ``polyshard_resilience.attempt``, beside the same step without.

    python -m benchmarks.step.attempt --tokens 512

The three take turns on the same ranks, model and data.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import polyshard_resilience
from benchmarks import harness
from benchmarks.harness import Found
from polyshard_resilience.rollback.undo import memories_of

PLAIN, AGREED, COPIED = "without", "undo_steps=False", "undo_steps=True"


@dataclass(frozen=True)
class Case(harness.Case, width=64, turns=1):
    """Bound by communication; with 512 tokens by computation."""

    ranks: int = 2
    width: int = 512
    tokens: int = 16
    turns: int = 15


def measure(case: Case) -> Found:
    """Medians of the slowest rank's seconds, ratios to the step without, and bytes on the host."""
    return harness.run_ranks(case.ranks, _measure, case)


def _measure(case: Case) -> Found:
    training = harness.linear_training(case.width, 8, case.tokens, lr=1e-4)
    attempt = partial(polyshard_resilience.attempt, training.model, training.optimizer)
    ways: dict[str, Callable[[], Any]] = {
        PLAIN: nullcontext,
        AGREED: partial(attempt, undo_steps=False),
        COPIED: attempt,
    }

    def step(way: Callable[[], Any]) -> None:
        with way():
            training.step()

    times = harness.time_steps({name: partial(step, way) for name, way in ways.items()}, case.turns)
    return {
        "seconds": harness.median_of(times),
        "ratios": {name: harness.paired(each, times[PLAIN]) for name, each in times.items()},
        "shard_bytes": harness.nbytes(harness.local(training.model.parameters())),
        "host_bytes": memories_of(training.model).nbytes,
    }


if __name__ == "__main__":
    harness.command(measure, Case(), __doc__)
