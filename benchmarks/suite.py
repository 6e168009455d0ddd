"""Every measurement, one after the other: JSON, pictures, and the page of tables.

    python -m benchmarks                   (all of it; about a quarter of an hour on 2 cores)
    python -m benchmarks --only wide-2 host-cost
    python -m benchmarks --quick           (small and short, to see that it runs)

A full run writes benchmarks/results/, docs/assets/ and docs/reference/benchmarks.md; a quick one
writes everything to runs/bench/, unless told otherwise. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import gpu, sim
from benchmarks.checkpoint import stall
from benchmarks.guards import cost as guards_cost
from benchmarks.host import cost
from benchmarks.matrix import step as matrix_step
from benchmarks.optimizer import step as optimizer_step
from benchmarks.ranks import run_alone, run_ranks
from benchmarks.report import figures, headline, page
from benchmarks.reproducible import step as reproducible_step
from benchmarks.result import RESULTS, ROOT, About, Result, read_all
from benchmarks.step import breakdown, steadiness
from benchmarks.step import time as step_time
from benchmarks.step.rows import MAIN_ROWS, ROWS, STEADY_ROW, Row, row

QUICK_RESULTS = ROOT / "runs" / "bench"
QUICK_STEADY_STEPS = 20

Measure = Callable[[bool], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One file of results. ``measure`` is told whether to be quick."""

    name: str
    kind: str
    measure: Measure
    show: Callable[[dict[str, Any]], None]


@cache
def _quick_timings(ranks: int) -> dict[str, dict[str, Any]]:
    """Every row of ``ranks`` in the same processes: starting them is most of a quick run."""
    rows = [each for each in ROWS if each.case.ranks == ranks]
    cases = [each.quick().case for each in rows]
    found = run_ranks(ranks, step_time.time_cases, cases)
    return dict(zip((each.name for each in rows), found, strict=True))


def _row_part(each: Row) -> Part:
    def measure(quick: bool) -> dict[str, Any]:
        if quick:
            timed = _quick_timings(each.case.ranks)[each.name]
            return step_time.summarize(each.quick().case, timed, {})
        return step_time.measure(each.case, memory=each.memory)

    return Part(each.name, "step-time", measure, step_time.show)


def _breakdown_part(name: str) -> Part:
    def measure(quick: bool) -> dict[str, Any]:
        return breakdown.measure((row(name).quick() if quick else row(name)).case)

    return Part(f"breakdown-{name}", "breakdown", measure, breakdown.show)


def _steadiness(quick: bool) -> dict[str, Any]:
    chosen = row(STEADY_ROW)
    if quick:
        return steadiness.measure(chosen.quick().case, QUICK_STEADY_STEPS)
    return steadiness.measure(chosen.case)


def _host_cost(quick: bool) -> dict[str, Any]:
    sizes, steps = (cost.QUICK, 3) if quick else (cost.CROSS, 10)
    found: dict[str, Any] = run_alone(cost.measure_all, sizes, steps)
    return found


def _gpu(quick: bool) -> dict[str, Any]:
    settings = gpu.Settings.default(tiny=quick or not gpu.has_device())
    found: dict[str, Any] = run_alone(gpu.measure, settings)
    return found


def _sim(quick: bool) -> dict[str, Any]:
    return sim.measure(list(sim.ROWS)[:1] if quick else sim.ROWS)


def _stall(quick: bool) -> dict[str, Any]:
    return stall.measure(2, *((64, 2, 1) if quick else (2048, 8, 7)))


def _guards(quick: bool) -> dict[str, Any]:
    return guards_cost.measure(2, *((64, 16, 1) if quick else (512, 512, 15)))


def _reproducible_part(name: str, case: reproducible_step.Case) -> Part:
    def measure(quick: bool) -> dict[str, Any]:
        return reproducible_step.measure(case.quick() if quick else case)

    return Part(name, "reproducible", measure, reproducible_step.show)


def _optimizer(quick: bool) -> dict[str, Any]:
    return optimizer_step.measure(quick=quick)


def _muon_part(ranks: int) -> Part:
    def measure(quick: bool) -> dict[str, Any]:
        case = matrix_step.Case(ranks=ranks)
        return matrix_step.measure(case.quick() if quick else case)

    return Part(f"muon-{ranks}", "matrix", measure, matrix_step.show)


PARTS: tuple[Part, ...] = (
    *map(_row_part, ROWS),
    *map(_breakdown_part, MAIN_ROWS),
    Part("steadiness", "steadiness", _steadiness, steadiness.show),
    Part("host-cost", "host-cost", _host_cost, cost.show),
    Part("optimizer-step", "optimizer", _optimizer, optimizer_step.show),
    Part("checkpoint-stall", "checkpoint", _stall, stall.show),
    Part("guards", "guards", _guards, guards_cost.show),
    *map(_muon_part, (2, 4)),
    _reproducible_part("reproducible", reproducible_step.Case()),
    _reproducible_part("reproducible-wide", reproducible_step.Case(width=1024, tokens=16)),
    Part("gpu", "gpu", _gpu, gpu.show),
    Part("sim", "simulated", _sim, sim.show),
)


def run_part(part: Part, folder: Path, about: About) -> bool:
    """Measure, show and write; False (with the error printed) if that failed."""
    begin = time.perf_counter()
    print(f"\n=== {part.name}", flush=True)
    try:
        found = part.measure(about.quick)
    except Exception:
        traceback.print_exc()
        return False
    part.show(found)
    Result(part.name, part.kind, about, found).write(folder)
    print(f"({time.perf_counter() - begin:.0f} s)", flush=True)
    return True


def publish(folder: Path) -> None:
    """Pictures and page from what ``folder`` holds."""
    results = read_all(folder)
    official = folder.resolve() == RESULTS.resolve()
    assets = page.ASSETS if official else folder
    figures.draw_all(results, assets)
    if official:
        headline.main()
    path = page.PAGE if official else folder / "benchmarks.md"
    path.write_text(page.page(results, "../assets" if official else "."), encoding="utf-8")
    print(f"\nwrote {path} and the pictures in {assets}")


def parse() -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="names for --only")
    parser.add_argument("--results", type=Path, help="folder of the JSON files")
    parser.add_argument("--publish", action="store_true", help="only pictures and page, from JSON")
    return parser.parse_args()


def main() -> int:
    """Run what was asked for; 1 if anything of it failed."""
    options = parse()
    if options.list:
        print("\n".join(part.name for part in PARTS))
        return 0
    folder = options.results or (QUICK_RESULTS if options.quick else RESULTS)
    failed = []
    if not options.publish:
        words = " ".join(sys.argv[1:])
        about = About.here(f"nox -s bench -- {words}".removesuffix(" -- "), quick=options.quick)
        chosen = [part for part in PARTS if part.name in options.only]
        failed = [part.name for part in chosen if not run_part(part, folder, about)]
    publish(folder)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
