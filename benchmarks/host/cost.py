"""What a step costs the host, without transfers: torch's fake process group, one process.

    python -m benchmarks.host.cost                                       (a cross of sizes)
    python -m benchmarks.host.cost --groups 40 --parameters 8 --ranks 8 64 512 4096

Both engines shard the same model of tiny layers and take turns. Collectives return at once (see
silent.py), so a step is autograd, the layers, and the engine's own Python; the same model unsharded
is timed as well and subtracted. A parameter has one element a rank, the least that grows with the
world. Initialisation (``fully_shard`` on every unit) is timed once for each. With CUDA the models
are there, and what a step launches is counted too.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import polyshard
from benchmarks.host.launches import count_launches
from benchmarks.host.silent import silent_group
from benchmarks.result import save

WIDTH = 1
ENGINES = ("polyshard", "torch")


@dataclass(frozen=True)
class Size:
    """A model of ``groups`` units of ``parameters`` each, over ``ranks``."""

    ranks: int = 64
    groups: int = 40
    parameters: int = 8


CROSS = (
    *(Size(ranks=n) for n in (8, 64, 512, 4096)),
    *(Size(groups=n) for n in (10, 100, 1000)),
    *(Size(parameters=n) for n in (1, 50, 200)),
    Size(groups=1000, parameters=1),
    Size(groups=10, parameters=200),
)
"""Each size varied around (64 ranks, 40 groups, 8 parameters), and two corners."""
QUICK = (
    *(Size(ranks=n, groups=4) for n in (8, 64)),
    *(Size(groups=4, parameters=n) for n in (1, 50)),
)


class Layer(nn.Module):
    """Uses ``count`` parameters of ``rows`` rows, all trained."""

    def __init__(self, count: int, rows: int) -> None:
        """Values do not matter: nothing is ever transferred."""
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(rows, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + weight[0]
        return x


def build(size: Size) -> nn.Sequential:
    """Layers, each to be a unit, with as many rows a parameter as there are ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        return nn.Sequential(*(Layer(size.parameters, size.ranks) for _ in range(size.groups)))


def shard(model: nn.Sequential, fully_shard: Callable[..., Any]) -> float:
    """Seconds to shard every layer and the root."""
    begin = time.perf_counter()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return time.perf_counter() - begin


def train(model: nn.Module) -> None:
    device = next(model.parameters()).device
    model(torch.ones(2, WIDTH, device=device)).sum().backward()


def step_seconds(model: nn.Module) -> float:
    """Host time of one step: nothing here waits for a device."""
    begin = time.perf_counter()
    train(model)
    seconds = time.perf_counter() - begin
    model.zero_grad()
    return seconds


def measure(size: Size, steps: int) -> dict[str, Any]:
    """Medians in seconds, and the ratio of what is left without the layers' own work."""
    with silent_group(size.ranks):
        models = {name: build(size) for name in (*ENGINES, "plain")}
        init = {
            "polyshard": shard(models["polyshard"], polyshard.fully_shard),
            "torch": shard(models["torch"], torch_fully_shard),
        }
        medians = median_seconds(models, steps)
        launches = {name: count_launches(partial(train, model)) for name, model in models.items()}
    engine = {name: medians[name] - medians["plain"] for name in ENGINES}
    groups = size.groups + 1  # the root is one, empty here, which both engines visit
    return {
        **asdict(size),
        "microseconds_per_group": {n: 1e6 * engine[n] / groups for n in engine},
        "ratio": engine["polyshard"] / engine["torch"],
        "init_seconds": init,
        "init_ratio": init["polyshard"] / init["torch"],
        "launches_per_group": _per_group(launches, groups),
    }


def median_seconds(models: dict[str, nn.Sequential], steps: int) -> dict[str, float]:
    """Seconds of a step, in turns; the collector would otherwise charge one for another's."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for index in range(steps + 2):
        for name, model in models.items():
            if index < 2:
                gc.collect()
            value = step_seconds(model)
            if index >= 2:
                seconds[name].append(value)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _per_group(launches: dict[str, int | None], groups: int) -> dict[str, float] | None:
    """What engines launch beyond the plain model; ``None`` without CUDA."""
    plain = launches["plain"]
    if plain is None:
        return None
    return {n: ((launches[n] or 0) - plain) / groups for n in ENGINES}


def fit(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Microseconds a group as a line in its parameters, at the ranks and groups most rows have.

    ``largest_residual`` is relative to what was measured.
    """
    base = Size(groups=max((r["groups"] for r in rows), key=[r["groups"] for r in rows].count))
    chosen = [r for r in rows if (r["ranks"], r["groups"]) == (base.ranks, base.groups)]
    counts = [row["parameters"] for row in chosen]
    if len(set(counts)) < 2:
        return {}
    found = {}
    for name in ENGINES:
        times = [row["microseconds_per_group"][name] for row in chosen]
        line = statistics.linear_regression(counts, times)
        pairs = zip(counts, times, strict=True)
        residual = max(abs(line.slope * n + line.intercept - t) / t for n, t in pairs)
        found[name] = {
            "microseconds_per_parameter": line.slope,
            "microseconds_per_group": line.intercept,
            "largest_residual": residual,
        }
    return found


def measure_all(sizes: tuple[Size, ...], steps: int) -> dict[str, Any]:
    """Every size, and the fit; in a process of its own."""
    torch.set_num_threads(1)
    measure(Size(2, 2, 2), steps=1)  # imports and first calls
    # Large models take seconds a step, and average over their own groups.
    rows = [measure(size, steps if size.groups * size.parameters < 5000 else 3) for size in sizes]
    return {"rows": rows, "fit": fit(rows)}


def show(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        ours, theirs = row["microseconds_per_group"].values()
        print(
            f"{row['ranks']:>6} ranks {row['groups']:>5} groups of {row['parameters']:>4}: "
            f"{ours:>8.0f} us a group and step, torch {theirs:>8.0f} us, ratio {row['ratio']:.2f}; "
            f"init {row['init_ratio']:.2f}"
        )
    for name, line in found["fit"].items():
        print(
            f"{name}: {line['microseconds_per_group']:.0f} us a group and "
            f"{line['microseconds_per_parameter']:.1f} us a parameter, "
            f"off by at most {line['largest_residual']:.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--groups", type=int, nargs="+")
    parser.add_argument("--parameters", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    sizes = CROSS
    if options.ranks or options.groups or options.parameters:
        sizes = tuple(
            Size(ranks, groups, parameters)
            for ranks in options.ranks or [64]
            for groups in options.groups or [40]
            for parameters in options.parameters or [8]
        )
    found = measure_all(sizes, options.steps)
    show(found)
    if options.json:
        save(found, options.json)


if __name__ == "__main__":
    main()
