"""What sums that do not depend on the number of ranks cost a step.

    python -m benchmarks.reproducible.step

Copies of one model take turns on the same ranks and data: the same micro-batches with and without
the plugin, each reduced, and both again with gradients clipped. Memory is the peak of processes of
their own, above what is resident before the first step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import polyshard
from benchmarks.ranks import run_ranks
from benchmarks.result import save
from benchmarks.step.memory import peak_resident_bytes, resident_bytes
from polyshard.seams import local_of
from polyshard_demo.model import LanguageModel, ModelSettings
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
        """Small, to see that it runs."""
        return replace(self, width=64, layers=2, tokens=16, turns=1)


class Training:
    """One copy of the model and its optimizer; ``name`` says what is different."""

    def __init__(self, name: str, case: Case) -> None:
        torch.manual_seed(0)
        settings = ModelSettings(
            width=case.width,
            layers=case.layers,
            heads=max(case.width // 64, 1),
            hidden=3 * case.width,
            sequence=case.tokens,
        )
        self.model = LanguageModel(settings)
        self._reproducible = Reproducible(case.slots) if REPRODUCIBLE in name else None
        self._micro_batches = case.slots // case.ranks
        plugins = [self._reproducible] if self._reproducible else []
        for block in self.model.blocks:
            polyshard.fully_shard(block, plugins=plugins)
        polyshard.fully_shard(self.model, plugins=plugins)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self._clip: Callable[..., object] | None = None
        if CLIPPED in name:
            self._clip = clip_grad_norm_ if self._reproducible else torch.nn.utils.clip_grad_norm_

    @property
    def bytes_of_a_gradient(self) -> int:
        """Of a sharded one, on this rank."""
        return sum(local_of(p).nbytes for p in self.model.parameters())

    def step(self, batch: Tensor) -> float:
        """Seconds of one step on ``batch`` (``[1, tokens + 1]``)."""
        dist.barrier()
        begin = time.perf_counter()
        for loss in self._losses(batch):
            loss.backward()
        if self._clip is not None:
            self._clip(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin

    def _losses(self, batch: Tensor) -> Iterator[Tensor]:
        if self._reproducible is not None:
            for _ in self._reproducible.each_slot(self.model, step=0):
                yield self._loss(batch)
        else:
            for _ in range(self._micro_batches):
                yield self._loss(batch) / self._micro_batches

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def measure(case: Case) -> dict[str, Any]:
    """Median seconds, ratios of single turns, and peaks of memory in bytes."""
    found: dict[str, Any] = run_ranks(case.ranks, _time, case)
    peaks = {name: run_ranks(case.ranks, _peak, name, case) for name in NAMES[:2]}
    return {**found, "peak_bytes": peaks}


def _batch(case: Case) -> Tensor:
    return torch.randint(0, 256, (1, case.tokens + 1))


def _time(case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainings = {name: Training(name, case) for name in NAMES}
    batch, times = _batch(case), {name: list[float]() for name in NAMES}
    for turn in range(case.turns + 2):  # the first two allocate
        for name, training in trainings.items():
            seconds = torch.tensor(training.step(batch))
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn > 1:
                times[name].append(float(seconds))
    return {
        "case": asdict(case),
        "gradient_bytes": trainings[PLAIN].bytes_of_a_gradient,
        "step_seconds": {name: statistics.median(values) for name, values in times.items()},
        "ratios": {
            name: statistics.median(
                slow / fast
                for slow, fast in zip(times[REPRODUCIBLE + name], times[PLAIN + name], strict=True)
            )
            for name in ("", CLIPPED)
        },
    }


def _peak(name: str, case: Case) -> int:
    torch.set_num_threads(1)
    training, batch = Training(name, case), _batch(case)
    before = resident_bytes()
    for _ in range(4):
        training.step(batch)
    peak = torch.tensor(peak_resident_bytes() - before)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def show(found: dict[str, Any]) -> None:
    case = found["case"]
    print(
        f"{case['ranks']} ranks, {case['slots']} slots, d={case['width']}, {case['tokens']} tokens"
    )
    for name, seconds in found["step_seconds"].items():
        print(f"{name:>24}: {1e3 * seconds:.1f} ms a step")
    for name, ratio in found["ratios"].items():
        print(f"{'paired' + name:>24}: {ratio:.3f}")
    gradient, peaks = found["gradient_bytes"], found["peak_bytes"]
    more = (peaks[REPRODUCIBLE] - peaks[PLAIN]) / gradient
    print(f"{'peak memory':>24}: {more:+.2f} sharded gradients of {gradient / 2**20:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in asdict(Case()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = vars(parser.parse_args())
    path = options.pop("json")
    found = measure(Case(**options))
    show(found)
    if path:
        save(found, path)


if __name__ == "__main__":
    main()
