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
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

from benchmarks import checkpoint, gpu, guards, matrix, optimizer, pretrained, reproducible, sim
from benchmarks import publish as publishing
from benchmarks.harness import Found, run_alone, run_ranks, show
from benchmarks.host import cost
from benchmarks.report import figures, headline, page
from benchmarks.result import RESULTS, ROOT, About, Result, read_all
from benchmarks.step import breakdown, steadiness
from benchmarks.step import time as step_time
from benchmarks.step.rows import MAIN_ROWS, ROWS, STEADY_ROW, Row, row

QUICK_RESULTS = ROOT / "runs" / "bench"
QUICK_STEADY_STEPS = 20


@dataclass(frozen=True)
class Part:
    """One file of results. ``measure`` is told whether to be quick."""

    name: str
    kind: str
    measure: Callable[[bool], Found]


@cache
def _quick_timings(ranks: int) -> Found:
    """Every row of ``ranks`` in the same processes: starting them is most of a quick run."""
    rows = [each for each in ROWS if each.case.ranks == ranks]
    cases = [each.quick().case for each in rows]
    found = run_ranks(ranks, step_time.time_cases, cases)
    return dict(zip((each.name for each in rows), found, strict=True))


def _row(each: Row, quick: bool) -> Found:
    if quick:
        timed = _quick_timings(each.case.ranks)[each.name]
        return step_time.summarize(each.quick().case, timed, {})
    return step_time.measure(step_time.Timing(**asdict(each.case), memory=each.memory))


def _steadiness(quick: bool) -> Found:
    chosen = row(STEADY_ROW)
    case, steps = chosen.case, steadiness.STEPS
    if quick:
        case, steps = chosen.quick().case, QUICK_STEADY_STEPS
    return steadiness.measure(replace(case, steps=steps))


def _host_cost(quick: bool) -> Found:
    return cost.measure(cost.QUICK, 3) if quick else cost.measure(cost.CROSS, 10)


def _gpu(quick: bool) -> Found:
    settings = gpu.Settings.default(tiny=quick or not gpu.has_device())
    found: Found = run_alone(gpu.measure, settings)
    return found


def _sim(quick: bool) -> Found:
    return sim.measure(list(sim.ROWS)[:1] if quick else sim.ROWS)


def _of(measure: Callable[..., Found], case: object) -> Callable[[bool], Found]:
    """A measurement of ``case``, which knows a quick one."""
    quickly: Callable[[], object] = getattr(case, "quick")  # noqa: B009
    return lambda quick: measure(quickly() if quick else case)


WIDE = reproducible.Case(width=1024, tokens=16)
PARTS: tuple[Part, ...] = (
    *(Part(each.name, "step-time", partial(_row, each)) for each in ROWS),
    *(Part(f"breakdown-{n}", "breakdown", _of(breakdown.measure, row(n).case)) for n in MAIN_ROWS),
    Part("steadiness", "steadiness", _steadiness),
    Part("host-cost", "host-cost", _host_cost),
    Part("optimizer-step", "optimizer", _of(optimizer.measure, optimizer.Case())),
    Part("checkpoint-stall", "checkpoint", _of(checkpoint.measure, checkpoint.Case())),
    *(
        Part(f"pretrained-{n}", "pretrained", _of(pretrained.measure, pretrained.Case(n)))
        for n in (2, 4)
    ),
    *(Part(f"publish-{n}", "publish", _of(publishing.measure, publishing.Case(n))) for n in (2, 4)),
    Part("guards", "guards", _of(guards.measure, guards.Case())),
    *(Part(f"muon-{n}", "matrix", _of(matrix.measure, matrix.Case(ranks=n))) for n in (2, 4)),
    Part("reproducible", "reproducible", _of(reproducible.measure, reproducible.Case())),
    Part("reproducible-wide", "reproducible", _of(reproducible.measure, WIDE)),
    Part("gpu", "gpu", _gpu),
    Part("sim", "simulated", _sim),
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
    show(found)
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


def main() -> int:
    """Run what was asked for; 1 if anything of it failed."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="names for --only")
    parser.add_argument("--results", type=Path, help="folder of the JSON files")
    parser.add_argument("--publish", action="store_true", help="only pictures and page, from JSON")
    options = parser.parse_args()
    if options.list:
        print("\n".join(names))
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
