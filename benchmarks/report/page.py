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

Generated from `benchmarks/results/` by `python -m benchmarks.report.page`; run `nox -s bench`.

Ratios are of medians within one run in which polyshard and torch's `fully_shard` (FSDP2) take turns
on the same ranks and data; *paired* is the median of the ratios of single turns. The *floor* is the
same compute, optimizer and bytes with nothing around them. **Bold** misses its bar.
"""
STALL_BAR = 1.2
GUARDS_BAR = 0.01
EVERY_STEP = "every=1"
REPRODUCIBLE_BAR = 1.05
WITH_PICTURE = ("breakdown", "steadiness", "host-cost")
QUICK = """
> **These figures mean nothing.** They are of a quick run, small models and a few steps, to see that
> everything runs, and are held to no bar:
"""


def page(results: dict[str, Result], assets: str = "../assets") -> str:
    """The whole page; ``assets`` is where the pictures are, seen from it."""
    parts = [HEAD]
    if quick := [f"`{result.name}`" for result in results.values() if result.about.quick]:
        parts.append(f"{QUICK.rstrip()} {', '.join(quick)}.")
    parts.extend(step_time(results, assets))
    for title, kind, section in (
        ("Where the time goes", "breakdown", _breakdown),
        ("200 steps", "steadiness", _steadiness),
        ("Host cost", "host-cost", _host_cost),
        ("Optimizer steps", "optimizer", _optimizer),
        ("Checkpoints", "checkpoint", _checkpoint),
        ("Publishing weights", "publish", _publish),
        ("Guards", "guards", _guards),
        ("Whole matrices", "matrix", _matrix),
        ("The same bits at every world size", "reproducible", _reproducible),
        ("Device", "gpu", _gpu),
        ("On a simulated accelerator", "simulated", _simulated),
    ):
        chosen = [result for result in results.values() if result.kind == kind]
        if chosen:
            parts.append(f"\n## {title}\n")
        for result in chosen:
            name = [f"### {result.name}", ""] if len(chosen) > 1 else []
            parts.extend(["", *name, *section(result.found)])
            if kind in WITH_PICTURE:
                parts.append(f"\n![{result.name}]({assets}/{result.name}.png)")
    parts.extend(_machines(results.values()))
    return "\n".join(parts) + "\n"


def _breakdown(found: dict[str, Any]) -> Iterator[str]:
    case = found["case"]
    yield f"Milliseconds a step at width {case['width']}, {case['tokens']} tokens, by group;"
    yield "`transfer` is how long anything was under way, behind compute or not (a send or receive"
    yield "of gloo until somebody waits for it); the rest is time of the training thread, as"
    yield "`benchmarks/step/spans.py` defines it. What a rank sends a step is polyshard's count.\n"
    head = ("group", "engine", *COLUMNS, "MiB sent")
    yield from table(head, _breakdown_rows(found))


def _breakdown_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    sent = found["sent_bytes"]
    for engine, groups in found["groups"].items():
        for group, parts in groups.items():
            times = (f"{1e3 * parts[part]:.2f}" for part in COLUMNS)
            known = engine == "polyshard" and group in sent
            yield group, engine, *times, f"{sent[group] / 2**20:.1f}" if known else ""
        totals = (1e3 * sum(parts[part] for parts in groups.values()) for part in COLUMNS)
        yield "**all**", engine, *(f"{total:.2f}" for total in totals), ""


def _steadiness(found: dict[str, Any]) -> Iterator[str]:
    case = found["case"]
    yield f"{case['steps']} steps at width {case['width']}, {case['tokens']} tokens; the first"
    yield "quarter is left out. Engines run one after the other, each in ranks of its own.\n"
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
    yield "One process, torch's fake process group with collectives that return at once;"
    yield "microseconds of host time a group and step beyond the same layers unsharded.\n"
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
    yield "AdamW alone, one rank: *host* is 1,000 parameters of 64 elements in 40 groups, *large*"
    yield "16.8 M elements. Weights are the same bits in each setting.\n"
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
    yield f"How long training stands still for an asynchronous save, {found['ranks']} ranks with"
    yield f"{shard:.0f} MiB of weights and moments each; *memcpy* copies them into memory that is"
    yield f"there. The bar is {STALL_BAR} of it. polyshard's files carry checksums, DCP's do not.\n"
    rows = (
        (name, f"{1e3 * stall:.0f}", _stall(name, found), f"{1e3 * ended:.0f}")
        for (name, stall), ended in zip(
            found["stall_seconds"].items(), found["complete_seconds"].values(), strict=True
        )
    )
    yield from table(("save", "stands still, ms", "/ memcpy", "complete after, ms"), rows)


def _stall(name: str, found: dict[str, Any]) -> str:
    ratio = found["stall_over_memcpy"][name]
    missed = name == "polyshard" and ratio > STALL_BAR
    return f"**{ratio:.2f}**" if missed else f"{ratio:.2f}"


def _publish(found: dict[str, Any]) -> Iterator[str]:
    yield f"A step's weights to a bfloat16 receiver, {found['ranks']} ranks, model of"
    yield f"{found['model_bytes'] / 2**20:.0f} MiB of fp32, AdamW at 1e-6. Every rank and the"
    yield f"receiver have a link of their own ({found['link']} each way); MiB are what ranks' links"
    yield "carried. What a rank holds meanwhile: `test_no_rank_holds_more_than_a_few_pieces`.\n"
    rows = (
        (
            f"`{way}`",
            f"{1e3 * seconds:.0f}",
            f"{found['full_tensor_over'][way]:.1f}",
            f"{found['rank_0_over'][way]:.1f}",
            f"{found['link_bytes'][way] / 2**20:.1f}",
        )
        for way, seconds in found["seconds"].items()
    )
    head = ("way", "ms", "`full_tensor` / this", "`rank 0` / this", "MiB")
    yield from table(head, rows)


def _guards(found: dict[str, Any]) -> Iterator[str]:
    step = 1e3 * found["step_seconds"]["no guard"]
    yield f"What guards add to a step of {step:.0f} ms, {found['ranks']} ranks with"
    yield f"{found['watched_bytes'] / 2**20:.0f} MiB of weights and moments each, {found['tokens']}"
    yield f"tokens. The bar is {GUARDS_BAR:.0%} at the defaults.\n"
    rows = ((f"`{name}`", _added(name, part)) for name, part in found["added_to_a_step"].items())
    yield from table(("guard", "added to a step"), rows)


def _added(name: str, part: float) -> str:
    missed = not name.endswith(EVERY_STEP) and part > GUARDS_BAR
    return f"**{part:.2%}**" if missed else f"{part:.2%}"


def _matrix(found: dict[str, Any]) -> Iterator[str]:
    case, sent = found["case"], found["bytes"]
    yield f"{case['layers']} layers of {case['width']}², {case['ranks']} ranks: what follows the"
    yield "backward, the whole step, and bytes a rank for gradients and updates.\n"
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
    yield f"{case['width']}: the same micro-batches, each reduced, with and without the plugin.\n"
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
    yield "**Simulated**: kernels are the CPU's, the allocator follows CUDA's rules, no time is"
    yield "measured. Each cell is polyshard / FSDP2 in the last of three steps on rank 0; memory in"
    yield "MiB. What the columns are: [on a simulated accelerator](simulated.md).\n"
    yield from sim.lines(found)


def _value(value: object) -> str:
    if value is None:
        return "needs CUDA"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _machines(results: Iterable[Result]) -> Iterator[str]:
    runs: dict[str, list[str]] = {}
    for result in results:
        about = result.about
        versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
        run = f"`{about.command}`, {about.date}, commit {about.commit}; {about.machine}; {versions}"
        runs.setdefault(run, []).append(f"`{result.name}`")
    yield "\n## Runs\n"
    for run, names in runs.items():
        yield f"- {run}: {', '.join(names)}"


def main() -> None:
    PAGE.write_text(page(read_all(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
