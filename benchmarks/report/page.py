"""Fill in the tables of docs/reference/benchmarks.md from the JSON files in benchmarks/results/.

    python -m benchmarks --publish

What stands between ``<!-- NAME -->`` and ``<!-- end -->`` there is made here; the rest is written
by hand. Bars, and the reasons why some are missed, come from step/rows.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from benchmarks import clock, sim
from benchmarks.harness import MIB, Found, columns, table
from benchmarks.matrix import BARS as MUON_BARS
from benchmarks.optimizer import BARS as STEP_BARS
from benchmarks.report.steps import held, step_tables
from benchmarks.result import ROOT, Result, filled

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
ASSETS = ROOT / "docs" / "assets"
STALL_BAR = 1.2
GUARDS_BAR = 0.01
REPRODUCIBLE_BAR = 1.05


def page(results: dict[str, Result], assets: str = "../assets") -> str:
    """The whole page; ``assets`` is where the pictures are, seen from it."""
    text = PAGE.read_text("utf-8").replace("](../assets/", f"]({assets}/")
    parts: dict[str, Iterable[str]] = dict.fromkeys(re.findall("<!-- (?!end)(\\S+) -->", text), ())
    parts |= {name: tables(result) for name, result in results.items()}
    parts |= {"quick": _quick(results.values()), "runs": _runs(results.values())}
    return filled(text, parts | step_tables(results))


def tables(result: Result) -> Iterator[str]:
    """What the page says of one result."""
    if result.kind in SECTIONS:
        yield from SECTIONS[result.kind](result.found)


Columns = dict[str, Callable[[str], str]]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def _mib(size: float) -> str:
    return f"{size / MIB:.0f}"


def _steadiness(found: Found) -> Iterator[str]:
    case, summary = found["case"], found["summary"]
    yield f"{case['steps']} steps at width {case['width']}, {case['tokens']} tokens; the first"
    yield "quarter is left out. Engines run in sequence.\n"
    cells: Columns = {
        "engine": str,
        "growth, KiB a step": lambda engine: f"{summary[engine]['growth_kib_per_step']:+.2f}",
        "largest spike, KiB": lambda engine: f"{summary[engine]['spike_kib']:.0f}",
        "median RSS, MiB": lambda engine: f"{summary[engine]['median_resident_kib'] / 1024:.0f}",
        "p50, ms": lambda engine: f"{1e3 * summary[engine]['p50_seconds']:.1f}",
        "p95, ms": lambda engine: f"{1e3 * summary[engine]['p95_seconds']:.1f}",
        "p99, ms": lambda engine: f"{1e3 * summary[engine]['p99_seconds']:.1f}",
    }
    yield from columns(summary, cells)


def _host_cost(found: Found) -> Iterator[str]:
    launches = any(row["launches_per_group"] for row in found["rows"])
    rows = []
    for row in found["rows"]:
        sizes = (str(row[key]) for key in ("ranks", "groups", "parameters"))
        times = (f"{value:.0f}" for value in row["microseconds_per_group"].values())
        ratios = (f"{row[key]:.2f}" for key in ("ratio", "init_ratio"))
        counts = (row["launches_per_group"] or {}).values()
        rows.append((*sizes, *times, *ratios, *(f"{count:.1f}" for count in counts)))
    head = ["ranks", "groups", "parameters", "polyshard", "FSDP2", "ratio", "`fully_shard` ratio"]
    yield from table(head + ["launches a group", "FSDP2's"] * launches, rows)
    yield ""
    for engine, line in found["fit"].items():
        yield (
            f"- {engine}: {line['microseconds_per_group']:.0f} µs a group and "
            f"{line['microseconds_per_parameter']:.1f} µs a parameter, off by at most "
            f"{line['largest_residual']:.0%}"
        )
    if not launches:
        yield "- Launches a group: no CUDA on this machine."


def _optimizer(found: Found) -> Iterator[str]:
    rows = []
    for name, ratios in found["flat / FSDP2, same setting"].items():
        for setting, ratio in ratios.items():
            times = (found["seconds"][name][f"{e} {setting}"] for e in ("flat", "FSDP2"))
            rows.append((name, setting, *(f"{1e3 * t:.2f}" for t in times), f"{ratio:.3f}"))
    yield from table(("size", "setting", "flat ms", "FSDP2 ms", "flat / FSDP2"), rows)
    yield ""
    for name, ratio in found["ratios"].items():
        yield f"- {name}: {held(ratio, STEP_BARS[name], '.3f')}, bar {STEP_BARS[name]}"


def _checkpoint(found: Found) -> Iterator[str]:
    shard, over = _mib(found["shard_bytes"]), found["stall_over_memcpy"]
    yield f"{found['ranks']} ranks with {shard} MiB each, which *memcpy* copies to existing memory."
    yield f"The bar is {STALL_BAR} of that.\n"
    cells: Columns = {
        "save": str,
        "stop, ms": lambda save: _ms(found["stall_seconds"][save]),
        "/ memcpy": lambda save: held(over[save], STALL_BAR if save == "polyshard" else None),
        "complete after, ms": lambda save: _ms(found["complete_seconds"][save]),
    }
    yield from columns(over, cells)


def _pretrained(found: Found) -> Iterator[str]:
    yield f"{found['ranks']} ranks, {found['model_bytes'] / 1e9:.2f} GB, turns: {found['turns']}.\n"
    ways = found["ways"]

    def gb(way: str, key: str) -> str:
        return f"{ways[way][key] / 1e9:.2f}"

    def ratio(way: str, key: str) -> str:
        return held(round(ways["polyshard"][key] / ways[way][key], 2), 1)

    cells: Columns = {
        "way": str,
        "s": lambda way: f"{ways[way]['seconds']:.1f}",
        "read": lambda way: gb(way, "read_bytes"),
        "peak": lambda way: gb(way, "peak_bytes"),
        "peak, all": lambda way: gb(way, "peak_bytes_sum"),
        "anonymous, all": lambda way: gb(way, "anonymous_bytes_sum"),
        "time: ours / this": lambda way: ratio(way, "seconds"),
        "read: ours / this": lambda way: ratio(way, "read_bytes"),
        "peak, all: ours / this": lambda way: ratio(way, "peak_bytes_sum"),
    }
    yield from columns(ways, cells)


def _publish(found: Found) -> Iterator[str]:
    size = _mib(found["model_bytes"])
    yield f"{found['ranks']} ranks, {size} MiB of fp32, links of {found['link']} each way:\n"
    cells: Columns = {
        "way": lambda way: f"`{way}`",
        "ms": lambda way: _ms(found["seconds"][way]),
        "`full_tensor` / this": lambda way: f"{found['full_tensor_over'][way]:.1f}",
        "`rank 0` / this": lambda way: f"{found['rank_0_over'][way]:.1f}",
        "sent, MiB": lambda way: f"{found['link_bytes'][way] / MIB:.1f}",
        "held by rank 0, MiB": lambda way: _mib(found["rank_0_bytes"][way]),
    }
    yield from columns(found["seconds"], cells)


def _guards(found: Found) -> Iterator[str]:
    step = _ms(found["step_seconds"]["no guard"])
    yield f"Time that guards add to a step of {step} ms: {found['ranks']} ranks with"
    yield f"{_mib(found['watched_bytes'])} MiB of weights and moments each, {found['tokens']}"
    yield f"tokens. The bar is {GUARDS_BAR:.0%} at the defaults.\n"
    rows = []
    for name, part in found["added_to_a_step"].items():
        bar = None if name.endswith("every=1") else GUARDS_BAR
        rows.append((f"`{name}`", held(part, bar, ".2%")))
    yield from table(("guard", "added to a step"), rows)


def _matrix(found: Found) -> Iterator[str]:
    case, sent = found["case"], found["bytes"]
    yield f"{case['layers']} layers of {case['width']}², {case['ranks']} ranks:\n"
    rows = (
        (name, _ms(spent["muon"]), _ms(spent["step"]), f"{sent[name] / MIB:.1f}")
        for name, spent in found["median_seconds"].items()
    )
    yield from table(("way", "Muon, ms", "step, ms", "MiB"), rows)
    for name, bar in MUON_BARS[case["ranks"]].items():
        yield f"- {name}: {held(found['ratios'][name], bar)} (bar {bar})"


def _reproducible(found: Found) -> Iterator[str]:
    case, gradient, peak = found["case"], found["gradient_bytes"], found["peak_bytes"]
    yield f"{case['slots']} slots of {case['tokens']} tokens on {case['ranks']} ranks, d="
    yield f"{case['width']}, each reduced, with and without the plugin.\n"
    yield from table(("", "step, ms"), ((n, _ms(s)) for n, s in found["step_seconds"].items()))
    for name, ratio in found["ratios"].items():
        yield f"- step, paired{name}: {held(ratio, REPRODUCIBLE_BAR)} (bar {REPRODUCIBLE_BAR})"
    more = (peak["Reproducible"] - peak["without"]) / gradient
    yield f"- peak of memory: {more:+.1f} sharded gradients of {_mib(gradient)} MiB (bar +1)"


def _gpu(found: Found) -> Iterator[str]:
    """Without CUDA there is nothing to show."""
    (rows,) = found["tables"].values()
    if None in (cell for row in rows for cell in row.values()):
        return
    yield f"{found['device']}, {found['model']}, group {found['group']}; polyshard / FSDP2:\n"
    shown = ("step ms", "launches", "copy ms", "peak allocated MiB")
    yield from table(shown, [[" / ".join(_value(row[key]) for row in rows[:2]) for key in shown]])


def _value(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


SECTIONS: dict[str, Callable[[Found], Iterator[str]]] = {
    "steadiness": _steadiness,
    "host-cost": _host_cost,
    "optimizer": _optimizer,
    "checkpoint": _checkpoint,
    "pretrained": _pretrained,
    "publish": _publish,
    "guards": _guards,
    "matrix": _matrix,
    "reproducible": _reproducible,
    "gpu": _gpu,
    "simulated": sim.lines,
    "clock": clock.lines,
}
"""By kind of result."""


def _quick(results: Iterable[Result]) -> Iterator[str]:
    if names := [f"`{result.name}`" for result in results if result.about.quick]:
        yield "> **These figures mean nothing.** A quick run of small models and a few steps shows"
        yield f"> that everything runs, held to no bar: {', '.join(names)}."


def _runs(results: Iterable[Result]) -> Iterator[str]:
    runs: dict[str, dict[str, list[str]]] = {}
    for result in results:
        about = result.about
        versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
        where = f"{about.machine.partition(', Linux')[0]}; {versions}"
        run = f"{about.date}, {about.commit}"
        runs.setdefault(where, {}).setdefault(run, []).append(f"`{result.name}`")
    for where, each in runs.items():
        yield f"\nOn {where}:\n"
        yield from (f"- {run}: {', '.join(names)}" for run, names in each.items())
