"""Where an engine's time goes, group by group, from the ranges both engines show to the profiler.

    python -m benchmarks.step.breakdown --width 1024

The parts are those of spans.py. Both engines take turns; a profiled step is slower than one that is
not, so these are shares, not step times.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import polyshard
from benchmarks.harness import Found, command, in_turns
from benchmarks.step import case
from benchmarks.step.engines import Engine, batches, build
from benchmarks.step.spans import COLUMNS, Parts, parts_by_group, spans_of


@dataclass(frozen=True)
class Case(case.Case):
    """A row taken apart."""

    def on_rank(self) -> Found:
        """Medians of seconds a step by engine, group and part."""
        engines = {name: build(name, self) for name in ("polyshard", "torch")}
        steps = self.warmup + self.steps
        every = batches(self, steps)

        def turn(engine: Engine, index: int) -> dict[str, Parts]:
            dist.barrier()
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                engine.step(every[index])
            return parts_by_group(spans_of(profiler.events()))

        ways = {name: partial(turn, engine) for name, engine in engines.items()}
        samples = in_turns(ways, self.steps, self.warmup)
        traffic = polyshard.stats(engines["polyshard"].model).groups
        return {
            "case": asdict(self),
            "groups": {name: _medians(found) for name, found in samples.items()},
            "sent_bytes": {name: group.sent_bytes // steps for name, group in traffic.items()},
        }


def _medians(samples: list[dict[str, Parts]]) -> dict[str, Parts]:
    return {
        group: {part: median(sample[group][part] for sample in samples) for part in COLUMNS}
        for group in samples[0]
    }


if __name__ == "__main__":
    command(Case(), __doc__)
