"""Whether memory and step time stay where they are: 200 steps, one engine a process.

    python -m benchmarks.step.steadiness [--steps 200]

Growth is the least-squares slope of resident memory over the last three quarters of the steps;
a spike is its largest value above the median there. Engines run one after the other, each in ranks
of its own (memory cannot be told apart otherwise), so their step times are not paired.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from benchmarks.harness import command, run_ranks
from benchmarks.step.case import Case
from benchmarks.step.engines import batches, build
from benchmarks.step.rows import STEADY_ROW, row
from polyshard_cli.compare.training.memory import resident

STEPS = 200
PERCENTILES = (50, 95, 99)
Samples = dict[str, list[float]]


def run_steps(case: Case, engine: str) -> Samples:
    """Resident bytes after, and seconds of, every step on rank 0."""
    built = build(engine, case)
    held: list[float] = []
    seconds: list[float] = []
    for batch in batches(case, case.steps):
        dist.barrier()
        seconds.append(built.step(batch)[1]["step"])
        held.append(float(resident("VmRSS:")))
    return {"resident_bytes": held, "seconds": seconds}


def summarize(samples: Samples) -> dict[str, float]:
    """Growth in KiB a step, the largest spike in KiB, and percentiles of seconds."""
    begin = len(samples["seconds"]) // 4
    kib = [value / 1024 for value in samples["resident_bytes"][begin:]]
    slope = statistics.linear_regression(range(len(kib)), kib).slope
    times = sorted(samples["seconds"][begin:])
    found = {
        "growth_kib_per_step": slope,
        "spike_kib": max(kib) - statistics.median(kib),
        "median_resident_kib": statistics.median(kib),
    }
    for percent in PERCENTILES:
        found[f"p{percent}_seconds"] = times[min(len(times) * percent // 100, len(times) - 1)]
    return found


def measure(long: Case) -> dict[str, Any]:
    samples = {
        name: run_ranks(long.ranks, run_steps, long, name) for name in ("polyshard", "torch")
    }
    summary = {name: summarize(found) for name, found in samples.items()}
    ratios = {
        f"p{percent} / torch": summary["polyshard"][f"p{percent}_seconds"]
        / summary["torch"][f"p{percent}_seconds"]
        for percent in PERCENTILES
    }
    return {"case": asdict(long), "samples": samples, "summary": summary, "ratios": ratios}


if __name__ == "__main__":
    command(measure, replace(row(STEADY_ROW).case, steps=STEPS), __doc__)
