"""Whether memory and step time stay where they are: 200 steps, one engine a process.

    python -m benchmarks step.steadiness [--steps 200]

Growth is the least-squares slope of resident memory over the last three quarters of the steps;
a spike is its largest value above the median there. Engines run one after the other, each in ranks
of its own (memory cannot be told apart otherwise), so their step times are not paired.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import linear_regression, median, quantiles

import torch.distributed as dist

from benchmarks.harness import Found, run_ranks
from benchmarks.step import case
from benchmarks.step.engines import batches, build
from polyshard_cli.compare.training.memory import resident

PERCENTILES = (50, 95, 99)
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Case(case.Case):
    """The row ``narrow-2``, for longer."""

    width: int = 512
    steps: int = 200

    def measure(self) -> Found:
        """Samples of both engines, and what they come to."""
        samples = {
            name: run_ranks(self.ranks, run_steps, self, name) for name in ("polyshard", "torch")
        }
        summary = {name: summarize(found) for name, found in samples.items()}
        return {"case": asdict(self), "samples": samples, "summary": summary}


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
    cuts = quantiles(samples["seconds"][begin:], n=100, method="inclusive")
    return {
        "growth_kib_per_step": linear_regression(range(len(kib)), kib).slope,
        "spike_kib": max(kib) - median(kib),
        "median_resident_kib": median(kib),
        **{f"p{percent}_seconds": cuts[percent - 1] for percent in PERCENTILES},
    }
