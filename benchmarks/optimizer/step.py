"""Optimizer steps alone: flat against FSDP2's, on the same sharded parameters, taking turns.

    python -m benchmarks.optimizer.step

One process, gloo, one thread. *Host* is 1,000 parameters of 64 elements in 40 groups, where
arithmetic is nothing; *large* is 16 matrices of 1024 x 1024 in as many groups. Gradients are those
of one backward, and stay. Reported are medians and their ratios; AdamW in every setting torch has.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import AdamW

import polyshard
from benchmarks.optimizer.bars import STEP_BARS
from benchmarks.ranks import run_ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class Size:
    """A model of ``groups`` units of ``parameters`` each, of ``numel`` elements a rank."""

    groups: int
    parameters: int
    numel: int


SIZES = {"host": Size(40, 25, 64), "large": Size(16, 1, 1 << 20)}
QUICK = {"host": Size(4, 5, 64), "large": Size(2, 1, 1 << 10)}


class Layer(nn.Module):
    """Uses every parameter."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size.numel) for _ in range(size.parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + weight.square().sum()
        return x


class Subject:
    """A sharded model with gradients, and its optimizer."""

    def __init__(self, size: Size, engine: str, setting: str) -> None:
        """``engine`` is ``flat`` or ``FSDP2``."""
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(size) for _ in range(size.groups)))
        fully_shard: Any = polyshard.fully_shard if engine == "flat" else torch_fully_shard
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        self.model = model
        self.optimizer = AdamW(model.parameters(), **SETTINGS[setting])
        if engine == "flat":
            polyshard.flat(self.optimizer)
        model(torch.zeros(())).backward()

    def seconds(self) -> float:
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin


def time_size(size: Size, steps: int) -> dict[str, float]:
    """Median seconds of a step, by engine and setting."""
    subjects = {f"{e} {s}": Subject(size, e, s) for e in ("flat", "FSDP2") for s in SETTINGS}
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for index in range(steps + 3):
        for name, subject in subjects.items():
            seconds = subject.seconds()
            if index >= 3:
                found[name].append(seconds)
    _check(subjects)
    return {name: statistics.median(values) for name, values in found.items()}


def _check(subjects: dict[str, Subject]) -> None:
    """Weights are those of FSDP2 in the same setting, to the last bit."""
    for setting in SETTINGS:
        pair = (subjects[f"{engine} {setting}"].model for engine in ("flat", "FSDP2"))
        for one, other in zip(*(model.parameters() for model in pair), strict=True):
            assert torch.equal(one.to_local(), other.to_local()), setting


def time_sizes(sizes: dict[str, Size], steps: int) -> dict[str, dict[str, float]]:
    """On a rank."""
    return {name: time_size(size, steps) for name, size in sizes.items()}


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Medians and ratios."""
    sizes, steps = (QUICK, 2) if quick else (SIZES, 15)
    seconds = run_ranks(1, time_sizes, sizes, steps)
    host, large = seconds["host"], seconds["large"]
    best = min(host[f"FSDP2 {setting}"] for setting in SETTINGS)
    ratios = (
        host["flat fused"] / best,
        large["flat fused"] / large["FSDP2 default"],
        large["flat fused"] / large["FSDP2 fused"],
    )
    return {
        "seconds": seconds,
        "ratios": dict(zip(STEP_BARS, ratios, strict=True)),
        "flat / FSDP2, same setting": {
            name: {s: of[f"flat {s}"] / of[f"FSDP2 {s}"] for s in SETTINGS}
            for name, of in seconds.items()
        },
    }


def show(found: dict[str, Any]) -> None:
    for name, seconds in found["seconds"].items():
        for subject, value in seconds.items():
            print(f"{name:8}{subject:16}{1e3 * value:>9.2f} ms")
    for name, ratio in found["ratios"].items():
        print(f"{name:40}{ratio:.3f} (bar {STEP_BARS[name]})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    show(measure(quick=parser.parse_args().quick))


if __name__ == "__main__":
    main()
