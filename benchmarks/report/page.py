"""Write docs/reference/benchmarks.md from the JSON files in benchmarks/results/.

    python -m benchmarks.report.page

Bars, and the reasons why some are missed, come from step/rows.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.result import RESULTS, ROOT, Result, read_all
from benchmarks.step.rows import CLOSE, FLOOR, MEMORY, ROWS, STEP, Row
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
WITHOUT_PICTURE = ("checkpoint", "gpu")
QUICK = """
> **These figures mean nothing.** They are of a quick run, small models and a few steps, to see that
> everything runs, and are held to no bar:
"""


def page(results: dict[str, Result], assets: str = "../assets") -> str:
    """The whole page; ``assets`` is where the pictures are, seen from it."""
    parts = [HEAD]
    if quick := [f"`{result.name}`" for result in results.values() if result.about.quick]:
        parts.append(f"{QUICK.rstrip()} {', '.join(quick)}.")
    parts.extend(_step_time(results, assets))
    for title, kind, section in (
        ("Where the time goes", "breakdown", _breakdown),
        ("200 steps", "steadiness", _steadiness),
        ("Host cost", "host-cost", _host_cost),
        ("Checkpoints", "checkpoint", _checkpoint),
        ("Device", "gpu", _gpu),
    ):
        chosen = [result for result in results.values() if result.kind == kind]
        if chosen:
            parts.append(f"\n## {title}\n")
        for result in chosen:
            name = [f"### {result.name}", ""] if len(chosen) > 1 else []
            parts.extend(["", *name, *section(result.found)])
            if kind not in WITHOUT_PICTURE:
                parts.append(f"\n![{result.name}]({assets}/{result.name}.png)")
    parts.extend(_machines(results.values()))
    return "\n".join(parts) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    cells = list(head)
    yield f"| {' | '.join(cells)} |"
    yield "|" + "---|" * len(cells)
    for row in rows:
        yield f"| {' | '.join(row)} |"


# --- step time ------------------------------------------------------------------------------------

_STEP_HEAD = (
    "row",
    "width, tokens, ranks, dtype",
    "polyshard ms",
    "FSDP2 ms",
    "step / FSDP2",
    "paired",
    "bar",
    "step / floor",
    "peak RSS / FSDP2",
    "losses",
)


def _step_time(results: dict[str, Result], assets: str) -> Iterator[str]:
    present = [row for row in ROWS if row.name in results]
    shown = [row.quick() if results[row.name].about.quick else row for row in present]
    if not shown:
        return
    yield "\n## Step time and memory\n"
    found = {row.name: results[row.name].found for row in shown}
    yield from table(_STEP_HEAD, (_step_row(row, found[row.name]) for row in shown))
    yield ""
    yield "Peak resident memory is the whole process's, 200 to 300 MiB of torch included; an engine"
    yield "runs alone for it. torch's allocator for the CPU keeps no statistics."
    notes = [f"- `{row.name}`: {row.note}" for row in shown if row.note]
    yield from ["", *notes] if notes else []
    missed = [line for row in shown for line in _missed(row, found[row.name])]
    if any(row.bars for row in shown):
        yield from ["", "### Bars that are missed", "", *(missed or ["None."])]
    yield f"\n![step time]({assets}/step-time.png)"


def _step_row(row: Row, found: dict[str, Any]) -> tuple[str, ...]:
    case, ratios = found["case"], found["ratios"]
    medians = {name: 1e3 * phases["step"] for name, phases in found["median_seconds"].items()}
    bars = {bar.quantity: bar.at_most for bar in row.bars}

    def cell(quantity: str) -> str:
        if quantity not in ratios:
            return ""
        text = f"{ratios[quantity]:.2f}"
        return f"**{text}**" if ratios[quantity] > bars.get(quantity, float("inf")) else text

    return (
        f"`{row.name}`",
        f"{case['width']}, {case['tokens']}, {case['ranks']}, {case['dtype']}",
        f"{medians['polyshard']:.1f}",
        f"{medians['torch']:.1f}",
        cell(STEP),
        f"{ratios[f'{STEP}, paired']:.2f}",
        f"{bars[STEP]:.2f}" if STEP in bars else "",
        cell(FLOOR),
        cell(MEMORY),
        _losses(row, found),
    )


def _losses(row: Row, found: dict[str, Any]) -> str:
    difference = found["losses_largest_relative_difference"]
    if found["losses_equal"]:
        return "bitwise"
    text = f"within {difference:.0e}"
    if row.losses == "lossy":
        return f"{text} (lossy)"
    ok = row.losses == "close" and difference <= CLOSE[row.case.dtype]
    return text if ok else f"**{text}**"


def _missed(row: Row, found: dict[str, Any]) -> Iterator[str]:
    for bar in row.bars:
        ratio = found["ratios"].get(bar.quantity)
        if ratio is not None and ratio > bar.at_most:
            reason = bar.reason or "No reason is recorded yet."
            yield f"- `{row.name}`, {bar.quantity} {ratio:.2f}, bar {bar.at_most:.2f}: {reason}"
    if _losses(row, found).startswith("**"):
        yield f"- `{row.name}`, losses: {_losses(row, found).strip('*')}, meant to be {row.losses}."


# --- the other measurements -----------------------------------------------------------------------


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


def _gpu(found: dict[str, Any]) -> Iterator[str]:
    yield f"On {found['device']}, {found['model']}, torch's process group {found['group']}.\n"
    for name, rows in found["tables"].items():
        yield f"\n### {name}\n"
        heads = list(rows[0])
        yield from table(heads, ([_value(row[head]) for head in heads] for row in rows))


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
