"""What the guards of a run cost a step.

    python -m benchmarks guards

Three copies of one model take turns on the same ranks and data: without guards, with `NonFinite`,
and with `Corruption` looking around every step. A look costs the same however rare it is, so what
it adds to a step at another `every` is that part of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from benchmarks import harness
from benchmarks.harness import Found, OnRanks
from polyshard_resilience import Corruption, NonFinite
from polyshard_resilience.guards.corruption import EVERY

PLAIN, NON_FINITE, CORRUPTION = "no guard", "NonFinite", "Corruption, every=1"


@dataclass(frozen=True)
class Case(OnRanks, width=64, tokens=16, turns=1):
    """What is measured."""

    width: int = 512
    tokens: int = 512
    turns: int = 15

    def on_rank(self) -> Found:
        """Medians in seconds of the slowest rank, and what guards add as parts of a step."""
        names = (PLAIN, NON_FINITE, CORRUPTION)
        trainings = {name: harness.language_training(self, 3 * self.width) for name in names}
        NonFinite(trainings[NON_FINITE].optimizer)
        guarded = trainings[CORRUPTION]
        Corruption(guarded.model, guarded.optimizer, every=1)
        steps = {name: training.step for name, training in trainings.items()}
        times = harness.time_steps(steps, self.turns, warmup=2)  # they allocate, and open a window
        added = {name: harness.paired(times[name], times[PLAIN]) - 1 for name in names[1:]}
        added[f"Corruption, every={EVERY}"] = added[CORRUPTION] / EVERY
        return {
            **asdict(self),
            "watched_bytes": harness.nbytes(trainings[PLAIN].shards()),
            "step_seconds": harness.median_of(times),
            "added_to_a_step": added,
        }
