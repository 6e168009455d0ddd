"""What sums that do not depend on the number of ranks cost a step.

    python -m benchmarks reproducible

Copies of one model take turns on the same ranks and data: the same micro-batches with and without
the plugin, each reduced, and both again with gradients clipped. Memory is the peak of processes of
their own, above what is resident before the first step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from benchmarks import harness
from benchmarks.harness import Found, OnRanks, Training, Work
from polyshard_cli.compare.training.memory import Meter
from polyshard_reproducible import Reproducible, clip_grad_norm_

PLAIN, REPRODUCIBLE, CLIPPED = "without", "Reproducible", ", clipping"
NAMES = (PLAIN, REPRODUCIBLE, PLAIN + CLIPPED, REPRODUCIBLE + CLIPPED)


@dataclass(frozen=True)
class Case(OnRanks, width=64, layers=2, tokens=16, turns=1):
    """One model, and how a step of it is cut; ``slots`` are of all ranks."""

    slots: int = 4
    width: int = 512
    layers: int = 8
    tokens: int = 512
    turns: int = 15

    def measure(self) -> Found:
        """Median seconds, ratios of single turns, and peaks of memory in bytes."""
        peaks = {name: harness.run_ranks(self.ranks, _peak, name, self) for name in NAMES[:2]}
        return {**super().measure(), "peak_bytes": peaks}

    def on_rank(self) -> Found:
        made = {name: trained(name, self) for name in NAMES}
        steps = {name: step for name, (_, step) in made.items()}
        times = harness.time_steps(steps, self.turns, warmup=2)  # the first two allocate
        return {
            "case": asdict(self),
            "gradient_bytes": harness.nbytes(harness.local(made[PLAIN][0].model.parameters())),
            "step_seconds": harness.median_of(times),
            "ratios": {
                n: harness.paired(times[REPRODUCIBLE + n], times[PLAIN + n]) for n in ("", CLIPPED)
            },
        }


def trained(name: str, case: Case) -> tuple[Training, Work]:
    """A model of its own, and a step of it; ``name`` says what is different."""
    plugin = Reproducible(case.slots) if REPRODUCIBLE in name else None
    plugins = [plugin] if plugin else []
    training = harness.language_training(
        case, 3 * case.width, case.layers, "foreach", plugins=plugins
    )
    count = case.slots // case.ranks

    def step() -> None:
        if plugin is not None:
            for _ in plugin.each_slot(training.model, step=0):
                training.loss().backward()
        else:
            for _ in range(count):
                (training.loss() / count).backward()
        if CLIPPED in name:
            clip = clip_grad_norm_ if plugin else torch.nn.utils.clip_grad_norm_
            clip(training.model.parameters(), 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()

    return training, step


def _peak(name: str, case: Case) -> int:
    _, step = trained(name, case)
    meter = Meter(harness.CPU)
    meter.begin_steps()
    for _ in range(4):
        step()
    return int(harness.slowest(meter.read().peak_bytes)[0])
