"""Where an engine's time goes, group by group, from the ranges both engines show to the profiler.

    python -m benchmarks.step.breakdown [--row wide-2] [--quick]

The parts are those of spans.py. Both engines take turns; a profiled step is slower than one that is
not, so these are shares, not step times.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import polyshard
from benchmarks.harness import run_ranks, show
from benchmarks.step.case import Case
from benchmarks.step.engines import Sharded, batches
from benchmarks.step.rows import MAIN_ROWS, row
from benchmarks.step.spans import COLUMNS, Parts, parts_by_group, spans_of


def profile_engines(case: Case) -> dict[str, Any]:
    """Medians over ``case.steps`` profiled steps by engine and group; on the ranks."""
    engines = {name: Sharded(case, name) for name in ("polyshard", "torch")}
    samples: dict[str, list[dict[str, Parts]]] = {name: [] for name in engines}
    for index, batch in enumerate(batches(case)):
        for name, engine in engines.items():
            dist.barrier()
            if index < case.warmup:
                engine.step(batch)
                continue
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                engine.step(batch)
            samples[name].append(parts_by_group(spans_of(profiler.events())))
    steps = case.warmup + case.steps
    traffic = polyshard.stats(engines["polyshard"].model).groups
    return {
        "groups": {name: _medians(found) for name, found in samples.items()},
        "sent_bytes": {name: group.sent_bytes // steps for name, group in traffic.items()},
    }


def _medians(samples: list[dict[str, Parts]]) -> dict[str, Parts]:
    return {
        group: {
            part: statistics.median(sample[group][part] for sample in samples) for part in COLUMNS
        }
        for group in samples[0]
    }


def measure(case: Case) -> dict[str, Any]:
    """A row taken apart: seconds a step by engine, group and part."""
    return {"case": asdict(case), **run_ranks(case.ranks, profile_engines, case)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", nargs="+", default=list(MAIN_ROWS))
    parser.add_argument("--quick", action="store_true", help="small models and few steps")
    options = parser.parse_args()
    for name in options.row:
        chosen = row(name).quick() if options.quick else row(name)
        print(name)
        show(measure(chosen.case))


if __name__ == "__main__":
    main()
