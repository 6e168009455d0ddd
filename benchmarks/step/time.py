"""Step time and peak memory against torch's ``fully_shard``, in pairs within one run.

    python -m benchmarks.step.time --width 1024 --layers 8 --tokens 16 --ranks 2

polyshard, torch's FSDP2, both with their best optimizer setting, DDP, FSDP1 and the floor (see
floor.py) take turns on the same ranks and data, so that whatever else the machine does hits all of
them alike. Reported are medians, the ratio of medians, and
the median of per-turn ratios. Peak memory is measured in runs of its own, one engine a process.
Losses of polyshard and torch are compared step by step.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import command, in_turns, paired, run_ranks
from benchmarks.step.case import Case
from benchmarks.step.engines import BEST, KEPT, PHASES, batches, build
from polyshard_cli.compare.training.memory import resident

MEMORY_STEPS = 4
OUR_BEST, THEIR_BEST, OUR_KEPT = f"polyshard{BEST}", f"torch{BEST}", f"{KEPT}{BEST}"
PAIRS = (
    ("polyshard", "torch", "torch"),
    ("polyshard", "floor", "floor"),
    (OUR_BEST, THEIR_BEST, THEIR_BEST),
    (OUR_BEST, "ddp", "ddp"),
    (OUR_BEST, "fsdp1", "fsdp1"),
    (OUR_KEPT, "ddp", "ddp, kept"),
)
"""What is compared, under which name: ``step / torch best``."""
Seconds = dict[str, list[dict[str, float]]]


def time_engines(case: Case, names: list[str]) -> dict[str, Any]:
    """Take turns, starting with another engine each time."""
    engines, every = {name: build(name, case) for name in names}, batches(case)

    def turn(name: str, index: int) -> tuple[float, dict[str, float]]:
        dist.barrier()
        return engines[name].step(every[index])

    found = in_turns({name: partial(turn, name) for name in names}, len(every), warmup=0)
    return {
        "seconds": {n: [t[1] for t in turns[case.warmup :]] for n, turns in found.items()},
        "losses": {n: [t[0] for t in turns] for n, turns in found.items()},
    }


def measure_memory(case: Case, name: str) -> dict[str, int]:
    """Resident bytes of one rank: the peak of a few steps of one engine alone, and before them.

    Before: with torch and the process group, and without a model. What the peak is above that is
    training's.
    """
    torch.ones(8, 8).mm(torch.ones(8, 8))
    before = resident("VmRSS:")
    engine = build(name, case)
    for batch in batches(case, MEMORY_STEPS):
        engine.step(batch)
    return {"peak": resident("VmHWM:"), "before": before}


def ratios_of(seconds: Seconds, memory: dict[str, dict[str, int]]) -> dict[str, float]:
    """Polyshard's medians over the others', by phase; and its peak over torch's."""
    ratios = {}
    for ours, other, name in PAIRS:
        if not {ours, other} <= seconds.keys():
            continue
        for phase in PHASES:
            ratio = _median(seconds, ours, phase) / _median(seconds, other, phase)
            ratios[f"{phase} / {name}"] = ratio
        own, theirs = ([turn["step"] for turn in seconds[one]] for one in (ours, other))
        ratios[f"step / {name}, paired"] = paired(own, theirs)
    for ours, other, name in PAIRS:
        if not {ours, other} <= memory.keys():
            continue
        one, two = memory[ours], memory[other]
        ratios[f"peak memory / {name}"] = one["peak"] / two["peak"]
        grown = (two["peak"] - two["before"]) or 1
        ratios[f"peak above start / {name}"] = (one["peak"] - one["before"]) / grown
    if {OUR_BEST, "torch"} <= memory.keys():
        best = memory[OUR_BEST]["peak"]
        ratios["peak memory, flat / torch"] = best / memory["torch"]["peak"]
    return ratios


def _median(seconds: Seconds, name: str, phase: str) -> float:
    return statistics.median(turn[phase] for turn in seconds[name])


def engines_of(case: Case, *, floor: bool = True) -> list[str]:
    """Who takes part; the floor and torch's older engines know the plain mode only."""
    names = ["polyshard", "torch", OUR_BEST, THEIR_BEST]
    if case.mode == "plain":
        names += [*(["floor"] if floor else []), "fsdp1"]
        names += ["ddp", OUR_KEPT] if case.dtype == "float32" else []
    return names


def time_cases(cases: list[Case]) -> list[dict[str, Any]]:
    """Several cases in the same processes, where starting them takes longer than the steps."""
    return [time_engines(case, engines_of(case)) for case in cases]


@dataclass(frozen=True)
class Timing(Case):
    """A case, and whether peaks of memory and the floor are measured too."""

    memory: bool = True
    floor: bool = True


def measure(timing: Timing) -> dict[str, Any]:
    """Medians, ratios, peaks, and whether losses agree; every engine in fresh processes."""
    case = Case(**{field.name: getattr(timing, field.name) for field in fields(Case)})
    timed = run_ranks(case.ranks, time_engines, case, engines_of(case, floor=timing.floor))
    names = [n for n in engines_of(case, floor=False) if timing.memory]
    peaks = {name: run_ranks(case.ranks, measure_memory, case, name) for name in names}
    return summarize(case, timed, peaks)


def summarize(
    case: Case, timed: dict[str, Any], peaks: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """What a result says of what :func:`time_engines` and :func:`measure_memory` found."""
    seconds, losses = timed["seconds"], timed["losses"]
    pairs = list(zip(losses["polyshard"], losses["torch"], strict=True))
    return {
        "case": asdict(case),
        "median_seconds": {
            name: {phase: _median(seconds, name, phase) for phase in PHASES} for name in seconds
        },
        "step_seconds": {name: [turn["step"] for turn in turns] for name, turns in seconds.items()},
        "resident_bytes": peaks,
        "ratios": ratios_of(seconds, peaks),
        "losses_equal": all(a == b for a, b in pairs),
        "losses_largest_relative_difference": max(abs(a - b) / abs(b) for a, b in pairs),
    }


if __name__ == "__main__":
    command(measure, Timing(), __doc__)
