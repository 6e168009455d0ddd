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
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import (
    checkpoint,
    clock,
    gpu,
    guards,
    matrix,
    optimizer,
    pretrained,
    reproducible,
    sim,
)
from benchmarks import publish as publishing
from benchmarks.harness import Case, show
from benchmarks.host import cost
from benchmarks.report import figures, headline, page
from benchmarks.result import RESULTS, ROOT, About, Result, read_all
from benchmarks.step import steadiness
from benchmarks.step.rows import ROWS

QUICK_RESULTS = ROOT / "runs" / "bench"


@dataclass(frozen=True)
class Part:
    """One file of results; ``kind`` is that of the page's section."""

    name: str
    kind: str
    case: Case


PARTS: tuple[Part, ...] = (
    *(Part(each.name, "step-time", each.case) for each in ROWS),
    Part("steadiness", "steadiness", steadiness.Case()),
    Part("host-cost", "host-cost", cost.Case()),
    Part("optimizer-step", "optimizer", optimizer.Case()),
    Part("checkpoint-stall", "checkpoint", checkpoint.Case()),
    *(Part(f"pretrained-{ranks}", "pretrained", pretrained.Case(ranks)) for ranks in (2, 4)),
    *(Part(f"publish-{ranks}", "publish", publishing.Case(ranks)) for ranks in (2, 4)),
    Part("guards", "guards", guards.Case()),
    *(Part(f"muon-{ranks}", "matrix", matrix.Case(ranks)) for ranks in (2, 4)),
    Part("reproducible", "reproducible", reproducible.Case()),
    Part("gpu", "gpu", gpu.Case()),
    Part("gpu-2", "gpu", gpu.Case(backend="nccl", ranks=2, layers=2)),  # which share it
    Part("sim", "simulated", sim.Case()),
    Part("clock", "clock", clock.Case()),
)


def run_part(part: Part, folder: Path, about: About) -> bool:
    """Measure, show and write; False (with the error printed) if that failed."""
    begin = time.perf_counter()
    print(f"\n=== {part.name}", flush=True)
    try:
        found = (part.case.quick() if about.quick else part.case).measure()
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
        headline.PICTURE.write_text(headline.headline(results), encoding="utf-8")
    path = page.PAGE if official else folder / "benchmarks.md"
    path.write_text(page.page(results, "../assets" if official else "."), encoding="utf-8")
    print(f"\nwrote {path} and the pictures in {assets}")


def main() -> int:
    """Run what was asked for; 1 if anything of it failed."""
    names = [part.name for part in PARTS]
    here = [part.name for part in PARTS if part.kind != "gpu" or torch.cuda.is_available()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--only", nargs="+", choices=names, default=here, metavar="NAME")
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
