"""Write docs/reference/benchmarks.md from the JSON files in benchmarks/results/.

    python -m benchmarks.report.page

Bars, and the reasons why some are missed, come from step/rows.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks import sim
from benchmarks.harness import table
from benchmarks.matrix import BARS as MUON_BARS
from benchmarks.optimizer import BARS as STEP_BARS
from benchmarks.report.steps import step_time
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
EVERY_STEP = "every=1"
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
Two cores were shared with other work, so times vary (`benchmarks/pretrained.py`).
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
    for title, kind, head, section in (
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
    ):
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


def _breakdown(found: dict[str, Any]) -> Iterator[str]:
    case = found["case"]
    yield f"Width {case['width']}, {case['tokens']} tokens:\n"
    head = ("engine", *COLUMNS, "MiB sent")
    yield from table(head, _breakdown_rows(found))


def _breakdown_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for engine, groups in found["groups"].items():
        totals = (1e3 * sum(parts[part] for parts in groups.values()) for part in COLUMNS)
        sent = sum(found["sent_bytes"].values()) / 2**20  # polyshard's count
        known = f"{sent:.1f}" if engine == "polyshard" else ""
        yield engine, *(f"{total:.2f}" for total in totals), known


def _steadiness(found: dict[str, Any]) -> Iterator[str]:
    case = found["case"]
    yield f"{case['steps']} steps at width {case['width']}, {case['tokens']} tokens; the first"
    yield "quarter is left out. Engines run in sequence.\n"
    head = ("engine", "growth, KiB a step", "largest spike, KiB", "median RSS, MiB")
    percents = ("p50", "p95", "p99")
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
    yield from table((*head, *(f"{p}, ms" for p in percents)), rows)


def _host_cost(found: dict[str, Any]) -> Iterator[str]:
    yield "Microseconds of host time per group and step beyond the same unsharded layers, in one"
    yield "process with torch's fake process group, whose collectives return at once.\n"
    launches = any(row["launches_per_group"] for row in found["rows"])
    head = ["ranks", "groups", "parameters", "polyshard", "FSDP2", "ratio", "`fully_shard` ratio"]
    yield from table(
        head + (["launches a group", "FSDP2's"] if launches else []),
        (_host_row(row, launches) for row in found["rows"]),
    )
    yield ""
    for engine, line in found["fit"].items():
        yield (
            f"- {engine}: {line['microseconds_per_group']:.0f} µs a group and "
            f"{line['microseconds_per_parameter']:.1f} µs a parameter, off by at most "
            f"{line['largest_residual']:.0%}"
        )
    if not launches:
        yield "- Launches a group: no CUDA on this machine."


def _host_row(row: dict[str, Any], launches: bool) -> tuple[str, ...]:
    times = [f"{row['microseconds_per_group'][name]:.0f}" for name in ("polyshard", "torch")]
    counts: list[str] = []
    if launches:
        counts = [f"{row['launches_per_group'][name]:.1f}" for name in ("polyshard", "torch")]
    sizes = (f"{row[key]}" for key in ("ranks", "groups", "parameters"))
    return (*sizes, *times, f"{row['ratio']:.2f}", f"{row['init_ratio']:.2f}", *counts)


def _optimizer(found: dict[str, Any]) -> Iterator[str]:
    yield "AdamW alone on one rank: *host* has 1,000 parameters of 64 elements in 40 groups, and"
    yield "*large* 16.8 M elements. Weights are bitwise equal.\n"
    seconds, same = found["seconds"], found["flat / FSDP2, same setting"]
    rows = (
        (
            name,
            setting,
            *(f"{1e3 * seconds[name][f'{engine} {setting}']:.2f}" for engine in ("flat", "FSDP2")),
            f"{ratio:.3f}",
        )
        for name, ratios in same.items()
        for setting, ratio in ratios.items()
    )
    yield from table(("size", "setting", "flat ms", "FSDP2 ms", "flat / FSDP2"), rows)
    yield ""
    for name, ratio in found["ratios"].items():
        bar = STEP_BARS[name]
        text = f"**{ratio:.3f}**" if ratio > bar else f"{ratio:.3f}"
        yield f"- {name}: {text}, bar {bar}"


def _checkpoint(found: dict[str, Any]) -> Iterator[str]:
    shard = found["shard_bytes"] / 2**20
    yield f"How long an asynchronous save stops training, {found['ranks']} ranks with {shard:.0f}"
    yield f"MiB each. *memcpy* copies them to existing memory; the bar is {STALL_BAR} of that."
    yield "polyshard's files have checksums, DCP's have none.\n"
    rows = (
        (name, f"{1e3 * stall:.0f}", _stall(name, found), f"{1e3 * ended:.0f}")
        for (name, stall), ended in zip(
            found["stall_seconds"].items(), found["complete_seconds"].values(), strict=True
        )
    )
    yield from table(("save", "stop, ms", "/ memcpy", "complete after, ms"), rows)


def _stall(name: str, found: dict[str, Any]) -> str:
    ratio = found["stall_over_memcpy"][name]
    missed = name == "polyshard" and ratio > STALL_BAR
    return f"**{ratio:.2f}**" if missed else f"{ratio:.2f}"


def _pretrained(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['ranks']} ranks, {found['model_bytes'] / 1e9:.2f} GB, turns: {found['turns']}.\n"
    keys = ("read_bytes", "peak_bytes", "peak_bytes_sum", "anonymous_bytes_sum")
    ours = found["ways"]["polyshard"]
    rows = (
        (
            name,
            f"{way['seconds']:.1f}",
            *(f"{way[key] / 1e9:.2f}" for key in keys),
            *(_ours(ours[key] / way[key]) for key in ("seconds", "read_bytes", "peak_bytes_sum")),
        )
        for name, way in found["ways"].items()
    )
    head = ("way", "s", "read", "peak", "peak, all", "anonymous, all")
    yield from table((*head, "time: ours / this", "read", "peak, all"), rows)


def _ours(ratio: float) -> str:
    return f"**{ratio:.2f}**" if ratio >= 1.005 else f"{ratio:.2f}"


def _publish(found: dict[str, Any]) -> Iterator[str]:
    size = found["model_bytes"] / 2**20
    yield f"{found['ranks']} ranks, {size:.0f} MiB of fp32, links of {found['link']} each way:\n"
    rows = (
        (
            f"`{way}`",
            f"{1e3 * seconds:.0f}",
            f"{found['full_tensor_over'][way]:.1f}",
            f"{found['rank_0_over'][way]:.1f}",
            f"{found['link_bytes'][way] / 2**20:.1f}",
            f"{found['rank_0_bytes'][way] / 2**20:.0f}" if "rank_0_bytes" in found else "",
        )
        for way, seconds in found["seconds"].items()
    )
    head = (
        "way",
        "ms",
        "`full_tensor` / this",
        "`rank 0` / this",
        "sent, MiB",
        "held by rank 0, MiB",
    )
    yield from table(head, rows)


def _guards(found: dict[str, Any]) -> Iterator[str]:
    step = 1e3 * found["step_seconds"]["no guard"]
    yield f"Time that guards add to a step of {step:.0f} ms: {found['ranks']} ranks with"
    yield f"{found['watched_bytes'] / 2**20:.0f} MiB of weights and moments each, {found['tokens']}"
    yield f"tokens. The bar is {GUARDS_BAR:.0%} at the defaults.\n"
    rows = ((f"`{name}`", _added(name, part)) for name, part in found["added_to_a_step"].items())
    yield from table(("guard", "added to a step"), rows)


def _added(name: str, part: float) -> str:
    missed = not name.endswith(EVERY_STEP) and part > GUARDS_BAR
    return f"**{part:.2%}**" if missed else f"{part:.2%}"


def _matrix(found: dict[str, Any]) -> Iterator[str]:
    case, sent = found["case"], found["bytes"]
    yield f"{case['layers']} layers of {case['width']}², {case['ranks']} ranks:\n"
    rows = (
        (name, f"{1e3 * m['muon']:.0f}", f"{1e3 * m['step']:.0f}", f"{sent[name] / 2**20:.1f}")
        for name, m in found["median_seconds"].items()
    )
    yield from table(("way", "Muon, ms", "step, ms", "MiB"), rows)
    for name, bar in MUON_BARS[case["ranks"]].items():
        ratio = found["ratios"][name]
        text = f"{ratio:.2f}" if ratio <= bar else f"**{ratio:.2f}**"
        yield f"- {name}: {text} (bar {bar})"


def _reproducible(found: dict[str, Any]) -> Iterator[str]:
    case, gradient = found["case"], found["gradient_bytes"]
    yield f"{case['slots']} slots of {case['tokens']} tokens on {case['ranks']} ranks, d="
    yield f"{case['width']}, each reduced, with and without the plugin.\n"
    rows = ((name, f"{1e3 * seconds:.0f}") for name, seconds in found["step_seconds"].items())
    yield from table(("", "step, ms"), rows)
    for name, ratio in found["ratios"].items():
        text = f"{ratio:.2f}" if ratio <= REPRODUCIBLE_BAR else f"**{ratio:.2f}**"
        yield f"- step, paired{name}: {text} (bar {REPRODUCIBLE_BAR})"
    more = (found["peak_bytes"]["Reproducible"] - found["peak_bytes"]["without"]) / gradient
    yield f"- peak of memory: {more:+.1f} sharded gradients of {gradient / 2**20:.0f} MiB (bar +1)"


def _gpu(found: dict[str, Any]) -> Iterator[str]:
    yield f"On {found['device']}, {found['model']}, torch's process group {found['group']}.\n"
    for name, rows in found["tables"].items():
        yield f"\n### {name}\n"
        heads = list(rows[0])
        yield from table(heads, ([_value(row[head]) for head in heads] for row in rows))


def _simulated(found: dict[str, Any]) -> Iterator[str]:
    yield "**Simulated**, without times: polyshard / FSDP2 ([columns](simulated.md)), in MiB.\n"
    yield from sim.lines(found)


def _value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


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
