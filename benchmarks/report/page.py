"""Write docs/reference/benchmarks.md from the JSON files in benchmarks/results/.

    python -m benchmarks.report.page

Bars, and the reasons why some are missed, come from step/rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from benchmarks import clock, sim
from benchmarks.harness import MIB, Found, table
from benchmarks.matrix import BARS as MUON_BARS
from benchmarks.optimizer import BARS as STEP_BARS
from benchmarks.report.steps import held, step_time
from benchmarks.result import RESULTS, ROOT, Result, read_all
from benchmarks.step.spans import COLUMNS

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
ASSETS = ROOT / "docs" / "assets"
HEAD = """# Benchmarks

This page lists every measured row against its bar. `python -m benchmarks.report.page` generates it
from `benchmarks/results/`; `nox -s bench` measures anew, `nox -s bench -- --only ROW` one row.

polyshard and torch's `fully_shard` (FSDP2) take turns on the same ranks and data. Ratios are of
medians within one run; *paired* is the median ratio of single turns. The *floor* is the same
compute, optimizer and bytes without an engine. **Bold** misses its bar.
"""
STALL_BAR = 1.2
GUARDS_BAR = 0.01
REPRODUCIBLE_BAR = 1.05
WITH_PICTURE = ("breakdown", "steadiness", "host-cost")
BREAKDOWN_HEAD = """
Milliseconds a step over all groups; the pictures show each. `transfer`: anything is under way,
behind compute or not. The others are time of the training thread (`benchmarks/step/spans.py`).
"""
PRETRAINED_HEAD = """
A Llama in bfloat16 from safetensors that are not in the page cache into shards. GB of the largest
rank, and of all: *read* from storage, *peak* of resident memory (*anonymous*: without mapped
files). *dcp* is a checkpoint of torch's, converted before by as many ranks. The bar is 1.00.
Four ranks share two cores (`benchmarks/pretrained.py`).
"""
PUBLISH_HEAD = """
A step's weights (AdamW at 1e-6) to a bfloat16 receiver. Every rank and the receiver have a link of
their own; MiB are what ranks' links carried.
"""
MATRIX_HEAD = """
Time after backward, time of the step, and bytes per rank for gradients and updates.
"""
QUICK = """
> **These figures mean nothing.** A quick run of small models and a few steps shows that everything
> runs, held to no bar:
"""


def page(results: dict[str, Result], assets: str = "../assets") -> str:
    """The whole page; ``assets`` is where the pictures are, seen from it."""
    parts = [HEAD]
    if quick := [f"`{result.name}`" for result in results.values() if result.about.quick]:
        parts.append(f"{QUICK.rstrip()} {', '.join(quick)}.")
    parts.extend(step_time(results, assets))
    for title, kind, head, section in SECTIONS:
        chosen = [result for result in results.values() if result.kind == kind and _says(result)]
        if chosen:
            parts.extend(["", f"## {title}", *([head.rstrip()] if head else [])])
        for result in chosen:
            name = [f"### {result.name}", ""] if len(chosen) > 1 else []
            parts.extend(["", *name, *section(result.found)])
            if kind in WITH_PICTURE:
                parts.append(f"\n![{result.name}]({assets}/{result.name}.png)")
    parts.extend(_machines(results.values()))
    return "\n".join(parts) + "\n"


def _says(result: Result) -> bool:
    """Whether there is something to show: a device without CUDA has no figures."""
    tables = result.found.get("tables", {}) if result.kind == "gpu" else {}
    return all(v is not None for rows in tables.values() for row in rows for v in row.values())


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def _mib(size: float) -> str:
    return f"{size / MIB:.0f}"


def _breakdown(found: Found) -> Iterator[str]:
    case = found["case"]
    yield f"Width {case['width']}, {case['tokens']} tokens:\n"
    sent = sum(found["sent_bytes"].values()) / MIB  # polyshard's count
    rows = []
    for engine, groups in found["groups"].items():
        totals = (1e3 * sum(parts[part] for parts in groups.values()) for part in COLUMNS)
        known = f"{sent:.1f}" if engine == "polyshard" else ""
        rows.append((engine, *(f"{total:.2f}" for total in totals), known))
    yield from table(("engine", *COLUMNS, "MiB sent"), rows)


def _steadiness(found: Found) -> Iterator[str]:
    case, percents = found["case"], ("p50", "p95", "p99")
    yield f"{case['steps']} steps at width {case['width']}, {case['tokens']} tokens; the first"
    yield "quarter is left out. Engines run in sequence.\n"
    rows = (
        (
            engine,
            f"{values['growth_kib_per_step']:+.2f}",
            f"{values['spike_kib']:.0f}",
            f"{values['median_resident_kib'] / 1024:.0f}",
            *(f"{1e3 * values[f'{p}_seconds']:.1f}" for p in percents),
        )
        for engine, values in found["summary"].items()
    )
    head = ("engine", "growth, KiB a step", "largest spike, KiB", "median RSS, MiB")
    yield from table((*head, *(f"{p}, ms" for p in percents)), rows)


def _host_cost(found: Found) -> Iterator[str]:
    yield "Microseconds of host time per group and step beyond the same unsharded layers, in one"
    yield "process with torch's fake process group, whose collectives return at once.\n"
    launches = any(row["launches_per_group"] for row in found["rows"])
    shown = [("microseconds_per_group", ".0f")] + [("launches_per_group", ".1f")] * launches
    rows = []
    for row in found["rows"]:
        times, *counts = (
            [f"{row[key][name]:{form}}" for name in ("polyshard", "torch")] for key, form in shown
        )
        sizes = (f"{row[key]}" for key in ("ranks", "groups", "parameters"))
        ratios = (f"{row[key]:.2f}" for key in ("ratio", "init_ratio"))
        rows.append((*sizes, *times, *ratios, *(cell for cells in counts for cell in cells)))
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
    yield "AdamW alone on one rank: *host* has 1,000 parameters of 64 elements in 40 groups, and"
    yield "*large* 16.8 M elements. Weights are bitwise equal.\n"
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
    shard = _mib(found["shard_bytes"])
    yield f"How long an asynchronous save stops training, {found['ranks']} ranks with {shard}"
    yield f"MiB each. *memcpy* copies them to existing memory; the bar is {STALL_BAR} of that."
    yield "polyshard's files have checksums, DCP's have none.\n"
    rows = []
    for name, stall in found["stall_seconds"].items():
        bar = STALL_BAR if name == "polyshard" else None
        ratio = held(found["stall_over_memcpy"][name], bar)
        rows.append((name, _ms(stall), ratio, _ms(found["complete_seconds"][name])))
    yield from table(("save", "stop, ms", "/ memcpy", "complete after, ms"), rows)


def _pretrained(found: Found) -> Iterator[str]:
    yield f"{found['ranks']} ranks, {found['model_bytes'] / 1e9:.2f} GB, turns: {found['turns']}.\n"
    keys = ("read_bytes", "peak_bytes", "peak_bytes_sum", "anonymous_bytes_sum")
    ours, compared = found["ways"]["polyshard"], ("seconds", "read_bytes", "peak_bytes_sum")
    rows = (
        (
            name,
            f"{way['seconds']:.1f}",
            *(f"{way[key] / 1e9:.2f}" for key in keys),
            *(held(round(ours[key] / way[key], 2), 1) for key in compared),
        )
        for name, way in found["ways"].items()
    )
    head = ("way", "s", "read", "peak", "peak, all", "anonymous, all")
    yield from table((*head, "time: ours / this", "read", "peak, all"), rows)


def _publish(found: Found) -> Iterator[str]:
    size = _mib(found["model_bytes"])
    yield f"{found['ranks']} ranks, {size} MiB of fp32, links of {found['link']} each way:\n"
    rows = (
        (
            f"`{way}`",
            _ms(seconds),
            f"{found['full_tensor_over'][way]:.1f}",
            f"{found['rank_0_over'][way]:.1f}",
            f"{found['link_bytes'][way] / MIB:.1f}",
            _mib(found["rank_0_bytes"][way]),
        )
        for way, seconds in found["seconds"].items()
    )
    head = ("way", "ms", "`full_tensor` / this", "`rank 0` / this", "sent, MiB")
    yield from table((*head, "held by rank 0, MiB"), rows)


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
    yield f"On {found['device']}, {found['model']}, torch's process group {found['group']}.\n"
    for name, rows in found["tables"].items():
        yield f"\n### {name}\n"
        yield from table(rows[0], (map(_value, row.values()) for row in rows))


def _simulated(found: Found) -> Iterator[str]:
    yield "**Simulated**, without times: polyshard / FSDP2 ([columns](simulated.md)), in MiB.\n"
    yield from sim.lines(found)


def _clock(found: Found) -> Iterator[str]:
    yield "**Simulated** step of a 7B Llama on H100 nodes, computed from public figures, not"
    yield "measured: polyshard / FSDP2, milliseconds ([columns](simulated.md#a-virtual-clock)).\n"
    yield from clock.lines(found)


def _value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


SECTIONS: tuple[tuple[str, str, str, Callable[[Found], Iterator[str]]], ...] = (
    ("Where the time goes", "breakdown", BREAKDOWN_HEAD, _breakdown),
    ("200 steps", "steadiness", "", _steadiness),
    ("Host cost", "host-cost", "", _host_cost),
    ("Optimizer steps", "optimizer", "", _optimizer),
    ("Checkpoints", "checkpoint", "", _checkpoint),
    ("Pretrained models", "pretrained", PRETRAINED_HEAD, _pretrained),
    ("Publishing weights", "publish", PUBLISH_HEAD, _publish),
    ("Guards", "guards", "", _guards),
    ("Whole matrices", "matrix", MATRIX_HEAD, _matrix),
    ("The same bits at every world size", "reproducible", "", _reproducible),
    ("Device", "gpu", "", _gpu),
    ("On a simulated accelerator", "simulated", "", _simulated),
    ("On a virtual clock", "clock", "", _clock),
)


def _machines(results: Iterable[Result]) -> Iterator[str]:
    runs: dict[str, dict[str, list[str]]] = {}
    for result in results:
        about = result.about
        versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
        where = f"{about.machine.partition(', Linux')[0]}; {versions}"
        run = f"{about.date}, {about.commit}"
        runs.setdefault(where, {}).setdefault(run, []).append(f"`{result.name}`")
    yield "\n## Runs"
    for where, each in runs.items():
        yield f"\nOn {where}:\n"
        yield from (f"- {run}: {', '.join(names)}" for run, names in each.items())


def main() -> None:
    PAGE.write_text(page(read_all(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
