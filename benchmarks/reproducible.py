"""What sums that do not depend on the number of ranks cost a step.

    python -m benchmarks.reproducible

Copies of one model take turns on the same ranks and data: the same micro-batches with and without
the plugin, each reduced, and both again with gradients clipped. Memory is the peak of processes of
their own, above what is resident before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

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
from polyshard_cli.compare.training.memory import resident
from polyshard_reproducible import Reproducible, clip_grad_norm_

PLAIN, REPRODUCIBLE = "without", "Reproducible"
CLIPPED = ", clipping"
NAMES = (PLAIN, REPRODUCIBLE, PLAIN + CLIPPED, REPRODUCIBLE + CLIPPED)


@dataclass(frozen=True)
class Case:
    """One model, and how a step of it is cut; ``slots`` are of all ranks."""

    ranks: int = 2
    slots: int = 4
    width: int = 512
    layers: int = 8
    tokens: int = 512
    turns: int = 15

    def quick(self) -> Case:
        return replace(self, width=64, layers=2, tokens=16, turns=1)


class Training:
    """One copy of the model and its optimizer; ``name`` says what is different."""

    def __init__(self, name: str, case: Case) -> None:
        self._reproducible = Reproducible(case.slots) if REPRODUCIBLE in name else None
        self._micro_batches = case.slots // case.ranks
        plugins = [self._reproducible] if self._reproducible else []
        model = language_model(case.width, case.layers, case.tokens, 3 * case.width)
        self.model = sharded(model, model.blocks, polyshard.fully_shard, plugins=plugins)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self._batch = torch.randint(0, 256, (1, case.tokens + 1))
        self._clip: Callable[..., object] | None = None
        if CLIPPED in name:
            self._clip = clip_grad_norm_ if self._reproducible else torch.nn.utils.clip_grad_norm_

    def step(self) -> None:
        for loss in self._losses():
            loss.backward()
        if self._clip is not None:
            self._clip(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _losses(self) -> Iterator[Tensor]:
        if self._reproducible is not None:
            for _ in self._reproducible.each_slot(self.model, step=0):
                yield loss_of(self.model, self._batch)
        else:
            for _ in range(self._micro_batches):
                yield loss_of(self.model, self._batch) / self._micro_batches


def measure(case: Case) -> Found:
    """Median seconds, ratios of single turns, and peaks of memory in bytes."""
    found: Found = run_ranks(case.ranks, _time, case)
    peaks = {name: run_ranks(case.ranks, _peak, name, case) for name in NAMES[:2]}
    return {**found, "peak_bytes": peaks}


def _time(case: Case) -> Found:
    trainings = {name: Training(name, case) for name in NAMES}
    ways = {name: slowest(training.step) for name, training in trainings.items()}
    times = in_turns(ways, case.turns, warmup=2)  # the first two allocate
    return {
        "case": asdict(case),
        "gradient_bytes": sum(shard.nbytes for shard in shards(trainings[PLAIN].model)),
        "step_seconds": median_of(times),
        "ratios": {n: paired(times[REPRODUCIBLE + n], times[PLAIN + n]) for n in ("", CLIPPED)},
    }


def _peak(name: str, case: Case) -> int:
    training = Training(name, case)
    before = resident("VmRSS:")
    for _ in range(4):
        training.step()
    peak = torch.tensor(resident("VmHWM:") - before)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


if __name__ == "__main__":
    command(measure, Case(), __doc__)
