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
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import polyshard
from benchmarks.harness import Found, in_turns, median_of, run_alone, seconds, sharded, show
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

    def quick(self) -> Size:
        return replace(self, groups=4)


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


def train(model: nn.Module) -> None:
    device = next(model.parameters()).device
    model(torch.ones(2, WIDTH, device=device)).sum().backward()


def measure_size(size: Size, steps: int) -> Found:
    """Medians in seconds, and the ratio of what is left without the layers' own work."""
    with silent_group(size.ranks):
        models = {name: build(size) for name in (*ENGINES, "plain")}
        libraries = {"polyshard": polyshard.fully_shard, "torch": torch_fully_shard}
        init = {
            name: seconds(partial(sharded, models[name], models[name], fully_shard))
            for name, fully_shard in libraries.items()
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
    """Host time of a step: nothing here waits for a device.

    Garbage is collected in the warm-up: it would otherwise charge one model for another's.
    """

    def turn(model: nn.Sequential, number: int) -> float:
        if number < 2:
            gc.collect()
        spent = seconds(partial(train, model))
        model.zero_grad()
        return spent

    ways = {name: partial(turn, model) for name, model in models.items()}
    return median_of(in_turns(ways, steps, warmup=2))


def _per_group(launches: dict[str, int | None], groups: int) -> dict[str, float] | None:
    """What engines launch beyond the plain model; ``None`` without CUDA."""
    plain = launches["plain"]
    if plain is None:
        return None
    return {n: ((launches[n] or 0) - plain) / groups for n in ENGINES}


def fit(rows: list[Found]) -> dict[str, dict[str, float]]:
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


def measure(sizes: tuple[Size, ...], steps: int) -> Found:
    """Every size, and the fit; in a process of its own."""
    found: Found = run_alone(_measure, sizes, steps)
    return found


def _measure(sizes: tuple[Size, ...], steps: int) -> Found:
    measure_size(Size(2, 2, 2), steps=1)  # imports and first calls
    # Large models take seconds a step, and average over their own groups.
    rows = [
        measure_size(size, steps if size.groups * size.parameters < 5000 else 3) for size in sizes
    ]
    return {"rows": rows, "fit": fit(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in asdict(Size()):
        parser.add_argument(f"--{name}", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    given = [getattr(options, name) or [default] for name, default in asdict(Size()).items()]
    chosen = any(getattr(options, name) for name in asdict(Size()))
    sizes = tuple(Size(*numbers) for numbers in product(*given)) if chosen else CROSS
    found = measure(sizes, options.steps)
    show(found)
    if options.json:
        save(found, options.json)


if __name__ == "__main__":
    main()
