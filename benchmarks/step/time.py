"""Step time and peak memory against torch's ``fully_shard``, in pairs within one run.

    python -m benchmarks step.time --width 1024 --layers 8 --tokens 16 --ranks 2 --memory

polyshard, torch's FSDP2, both with their best optimizer setting, DDP, FSDP1 and the floor (see
floor.py) take turns on the same ranks and data, so that whatever else the machine does hits all of
them alike. Reported are medians, the ratio of medians, and
the median of per-turn ratios. Peak memory is measured in runs of its own, one engine a process.
Losses of polyshard and torch are compared step by step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch.distributed as dist

from benchmarks.harness import Found, in_turns, paired, run_ranks
from benchmarks.step import case
from benchmarks.step.engines import BEST, KEPT_BEST, PHASES, batches, build
from polyshard_cli.compare.training.memory import resident

STEP = "step / torch"
FLOOR = "step / floor"
MEMORY = "peak memory / torch"
BEST_STEP = "step / torch best"
FLAT_MEMORY = "peak memory, flat / torch"
MEMORY_STEPS = 4
OUR_BEST, THEIR_BEST = f"polyshard{BEST}", f"torch{BEST}"
PAIRS = (("polyshard", "torch"), ("polyshard", "floor"), (OUR_BEST, THEIR_BEST))
Seconds = dict[str, list[dict[str, float]]]


@dataclass(frozen=True)
class Case(case.Case):
    """A row of the table."""

    def measure(self) -> Found:
        """Medians, ratios, peaks, and whether losses agree; every engine in fresh processes."""
        names = self.engines
        timed = run_ranks(self.ranks, time_engines, self, names)
        peaks = {
            name: run_ranks(self.ranks, measure_memory, self, name)
            for name in names
            if self.memory and name != "floor"
        }
        seconds, losses = timed["seconds"], timed["losses"]
        pairs = list(zip(losses["polyshard"], losses["torch"], strict=True))
        return {
            "case": asdict(self),
            "median_seconds": {name: medians(turns) for name, turns in seconds.items()},
            "step_seconds": {n: [turn["step"] for turn in turns] for n, turns in seconds.items()},
            "resident_bytes": peaks,
            "ratios": ratios_of(seconds, peaks),
            "losses_equal": all(a == b for a, b in pairs),
            "losses_largest_relative_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        }

    @property
    def engines(self) -> list[str]:
        """Those that take part; the floor and torch's older engines know the plain mode only."""
        names = ["polyshard", "torch", OUR_BEST, THEIR_BEST]
        if self.mode == "plain":
            names += ["floor", "fsdp1", *(["ddp", KEPT_BEST] if self.dtype == "float32" else [])]
        return names


def time_engines(case: case.Case, names: list[str]) -> Found:
    """Take turns, starting with another engine each time."""
    engines = {name: build(name, case) for name in names}
    every = batches(case, case.warmup + case.steps)

    def turn(name: str, index: int) -> tuple[float, dict[str, float]]:
        dist.barrier()
        return engines[name].step(every[index])

    found = in_turns({name: partial(turn, name) for name in names}, len(every), warmup=0)
    return {
        "seconds": {n: [t[1] for t in turns[case.warmup :]] for n, turns in found.items()},
        "losses": {n: [t[0] for t in turns] for n, turns in found.items()},
    }


def measure_memory(case: Case, name: str) -> dict[str, int]:
    """Resident bytes of one rank: the peak of a few steps of one engine alone."""
    engine = build(name, case)
    for batch in batches(case, MEMORY_STEPS):
        engine.step(batch)
    return {"peak": resident("VmHWM:")}


def ratios_of(seconds: Seconds, memory: dict[str, dict[str, int]]) -> dict[str, float]:
    """Polyshard's medians over the others', by phase; and its peak over torch's."""
    ratios = {}
    for ours, other in PAIRS:
        if other not in seconds:
            continue
        for phase in PHASES:
            own, theirs = ([turn[phase] for turn in seconds[one]] for one in (ours, other))
            ratios[f"{phase} / {other}"] = median(own) / median(theirs)
        ratios[f"step / {other}, paired"] = paired(own, theirs)  # the last phase is the step
    for ours, name in (("polyshard", MEMORY), (OUR_BEST, FLAT_MEMORY)):
        if ours in memory:
            ratios[name] = memory[ours]["peak"] / memory["torch"]["peak"]
    return ratios


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    """By phase."""
    return {phase: median(turn[phase] for turn in turns) for phase in PHASES}
