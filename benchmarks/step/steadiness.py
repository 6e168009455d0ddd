"""Whether memory and step time stay where they are: 200 steps, one engine a process.

    python -m benchmarks.step.steadiness [--steps 200]

Growth is the least-squares slope of resident memory over the last three quarters of the steps;
a spike is its largest value above the median there. Engines run one after the other, each in ranks
of its own (memory cannot be told apart otherwise), so their step times are not paired.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import linear_regression, median

import torch.distributed as dist

from benchmarks.harness import Found, command, run_ranks
from benchmarks.step.case import Case
from benchmarks.step.engines import batches, build
from benchmarks.step.rows import STEADY_ROW, row
from polyshard_cli.compare.training.memory import resident

CASE = replace(row(STEADY_ROW).case, steps=200)
PERCENTILES = (50, 95, 99)
Samples = dict[str, list[float]]


def run_steps(case: Case, engine: str) -> Samples:
    """Resident bytes after, and seconds of, every step on rank 0."""
    built = build(engine, case)
    found: Samples = {"resident_bytes": [], "seconds": []}
    for batch in batches(case, case.steps):
        dist.barrier()
        found["seconds"].append(built.step(batch)[1]["step"])
        found["resident_bytes"].append(float(resident("VmRSS:")))
    return found


def summarize(samples: Samples) -> dict[str, float]:
    """Growth in KiB a step, the largest spike in KiB, and percentiles of seconds."""
    begin = len(samples["seconds"]) // 4
    kib = [value / 1024 for value in samples["resident_bytes"][begin:]]
    times = sorted(samples["seconds"][begin:])
    return {
        "growth_kib_per_step": linear_regression(range(len(kib)), kib).slope,
        "spike_kib": max(kib) - median(kib),
        "median_resident_kib": median(kib),
        **{
            f"p{percent}_seconds": times[min(len(times) * percent // 100, len(times) - 1)]
            for percent in PERCENTILES
        },
    }


def measure(case: Case) -> Found:
    """Samples of both engines, and what they come to."""
    engines = ("polyshard", "torch")
    samples = {name: run_ranks(case.ranks, run_steps, case, name) for name in engines}
    summary = {name: summarize(found) for name, found in samples.items()}
    return {"case": asdict(case), "samples": samples, "summary": summary}


if __name__ == "__main__":
    command(measure, CASE, __doc__)
