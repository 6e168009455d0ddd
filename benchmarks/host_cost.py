"""What a step costs the host, without transfers: torch's fake process group, one process.

    python benchmarks/host_cost.py --groups 40 --parameters 8 --ranks 8 64 512 4096

Both engines shard the same model of tiny layers and take turns. A fake collective returns at once,
so a step is autograd, the layers, and the engine's own Python; the same model unsharded is timed as
well and subtracted. Initialisation (``fully_shard`` on every unit) is timed once for each.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import polyshard

WIDTH = 4


class Layer(nn.Module):
    """Uses ``count`` parameters of ``rows`` rows, all trained."""

    def __init__(self, count: int, rows: int) -> None:
        """Values do not matter: nothing is ever transferred."""
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(rows, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """One cheap operation a parameter."""
        for weight in self.weights:
            x = x + weight[0]
        return x


def build(groups: int, parameters: int, rows: int) -> nn.Sequential:
    """``groups`` layers, each to be a unit."""
    return nn.Sequential(*(Layer(parameters, rows) for _ in range(groups)))


def shard(model: nn.Sequential, fully_shard: Callable[..., Any]) -> float:
    """Seconds to shard every layer and the root."""
    begin = time.perf_counter()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return time.perf_counter() - begin


def step_seconds(model: nn.Module) -> float:
    """One forward and backward."""
    begin = time.perf_counter()
    model(torch.ones(2, WIDTH)).sum().backward()
    seconds = time.perf_counter() - begin
    model.zero_grad()
    return seconds


def measure(ranks: int, groups: int, parameters: int, steps: int) -> dict[str, Any]:
    """Medians in seconds, and the ratio of what is left without the layers' own work."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        models = {
            name: build(groups, parameters, ranks) for name in ("polyshard", "torch", "plain")
        }
        init = {
            "polyshard": shard(models["polyshard"], polyshard.fully_shard),
            "torch": shard(models["torch"], torch_fully_shard),
        }
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for index in range(steps + 2):
            for name, model in models.items():
                value = step_seconds(model)
                if index >= 2:
                    seconds[name].append(value)
    finally:
        dist.destroy_process_group()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    engine = {name: medians[name] - medians["plain"] for name in ("polyshard", "torch")}
    return {
        "ranks": ranks,
        "groups": groups,
        "parameters": parameters,
        "microseconds_per_group": {n: 1e6 * engine[n] / (groups + 1) for n in engine},
        "ratio": engine["polyshard"] / engine["torch"],
        "init_seconds": init,
        "init_ratio": init["polyshard"] / init["torch"],
    }


def show(row: dict[str, Any]) -> None:
    """One line for a person."""
    ours, theirs = row["microseconds_per_group"].values()
    print(
        f"{row['ranks']:>6} ranks {row['groups']:>5} groups of {row['parameters']:>4}: "
        f"{ours:>8.0f} us a group and step, torch {theirs:>8.0f} us, ratio {row['ratio']:.2f}; "
        f"init {row['init_ratio']:.2f}"
    )


def main() -> None:
    """Run the rows asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--groups", type=int, nargs="+", default=[40])
    parser.add_argument("--parameters", type=int, nargs="+", default=[8])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(2, 2, 2, steps=1)  # imports and first calls
    rows = [
        measure(ranks, groups, parameters, options.steps)
        for ranks in options.ranks
        for groups in options.groups
        for parameters in options.parameters
    ]
    for row in rows:
        show(row)
    if options.json:
        machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
        found = {"rows": rows, "torch": torch.__version__, "machine": machine}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
