"""What a step costs the host, without transfers: torch's fake process group, one process.

    python -m benchmarks host.cost                                       (a cross of sizes)
    python -m benchmarks host.cost --groups 40 --parameters 8 --ranks 8 64 512 4096

Both engines shard the same model of tiny layers and take turns. Collectives return at once (see
silent.py), so a step is autograd, the layers, and the engine's own Python; the same model unsharded
is timed as well and subtracted. A parameter has one element a rank, the least that grows with the
world. Initialisation (``fully_shard`` on every unit) is timed once for each. With CUDA the models
are there, and what a step launches is counted too.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import linear_regression

import torch
from torch import nn

from benchmarks import harness
from benchmarks.harness import (
    LIBRARIES,
    Found,
    Layer,
    in_turns,
    median_of,
    run_alone,
    seconds,
    sharded,
)
from benchmarks.host.launches import count
from benchmarks.host.silent import silent_group


@dataclass(frozen=True)
class Size(harness.Case, groups=4):
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


@dataclass(frozen=True)
class Case(harness.Case, ranks=(8, 64), groups=(4,), parameters=(1, 50), steps=3):
    """Every combination of sizes; without any, a cross of them."""

    ranks: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    steps: int = 10

    @property
    def sizes(self) -> tuple[Size, ...]:
        base, given = Size(), (self.ranks, self.groups, self.parameters)
        if not any(given):
            return CROSS
        default = (base.ranks, base.groups, base.parameters)
        chosen = (own or (one,) for own, one in zip(given, default, strict=True))
        return tuple(Size(*numbers) for numbers in product(*chosen))

    def measure(self) -> Found:
        """Every size, and the fit; in a process of its own."""
        return run_alone(_measure, self)


def build(size: Size) -> nn.Sequential:
    """Layers, each to be a unit, with as many rows a parameter as there are ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        return nn.Sequential(*(Layer(size.parameters, size.ranks, 1) for _ in range(size.groups)))


def train(model: nn.Module) -> None:
    device = next(model.parameters()).device
    model(torch.ones(2, 1, device=device)).sum().backward()


def measure_size(size: Size, steps: int) -> Found:
    """Medians in seconds, and the ratio of what is left without the layers' own work."""
    with silent_group(size.ranks):
        models = {name: build(size) for name in (*LIBRARIES, "plain")}
        init = {
            name: seconds(partial(sharded, models[name], models[name], library.fully_shard))
            for name, library in LIBRARIES.items()
        }
        medians = median_seconds(models, steps)
        launches: dict[str, int] = {}
        if torch.cuda.is_available():
            counted = {name: count(partial(train, model)) for name, model in models.items()}
            launches = {name: each.launches or 0 for name, each in counted.items()}
    groups = size.groups + 1  # the root is one, empty here, which both engines visit

    def per_group(found: dict[str, float]) -> dict[str, float]:
        """What engines take beyond the plain model."""
        return {name: (found[name] - found["plain"]) / groups for name in LIBRARIES}

    engine = per_group({name: 1e6 * spent for name, spent in medians.items()})
    return {
        **asdict(size),
        "microseconds_per_group": engine,
        "ratio": engine["polyshard"] / engine["torch"],
        "init_seconds": init,
        "init_ratio": init["polyshard"] / init["torch"],
        "launches_per_group": per_group(dict(launches)) if launches else None,
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
    for name in LIBRARIES:
        times = [row["microseconds_per_group"][name] for row in chosen]
        line = linear_regression(counts, times)
        pairs = zip(counts, times, strict=True)
        residual = max(abs(line.slope * n + line.intercept - t) / t for n, t in pairs)
        found[name] = {
            "microseconds_per_parameter": line.slope,
            "microseconds_per_group": line.intercept,
            "largest_residual": residual,
        }
    return found


def _measure(case: Case) -> Found:
    measure_size(Size(2, 2, 2), steps=1)  # imports and first calls
    # Large models take seconds a step, and average over their own groups.
    rows = [
        measure_size(size, case.steps if size.groups * size.parameters < 5000 else 3)
        for size in case.sizes
    ]
    return {"rows": rows, "fit": fit(rows)}
