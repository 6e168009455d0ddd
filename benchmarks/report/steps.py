"""The section of the page about what a step takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.harness import MIB, Found, table
from benchmarks.result import Result
from benchmarks.step.rows import (
    BEST_STEP,
    CLOSE,
    FLAT_MEMORY,
    FLOOR,
    KEPT,
    LOSSY,
    MEMORY,
    OTHERS,
    ROUNDED,
    ROWS,
    STEP,
    Row,
)

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


def step_time(results: dict[str, Result], assets: str) -> Iterator[str]:
    """The section of what a step takes; ``assets`` is where the pictures are."""
    present = [row for row in ROWS if row.name in results]
    shown = [row.quick() if results[row.name].about.quick else row for row in present]
    if not shown:
        return
    yield "\n## Step time and memory\n"
    found = {row.name: results[row.name].found for row in shown}
    yield from table(_STEP_HEAD, (_step_row(row, found[row.name]) for row in shown))
    yield ""
    yield "Peak RSS is of the whole process with one engine, 200 to 300 MiB of torch included."
    best = [row for row in shown if BEST_STEP in found[row.name]["ratios"]]
    if best:
        yield from ["", *_BEST, ""]
        yield from _best(best, found)
    notes = [f"- `{row.name}`: {row.note}" for row in shown if row.note]
    yield from ["", *notes] if notes else []
    missed = [line for row in shown for line in _missed(row, found[row.name])]
    if any(row.bars for row in shown):
        yield from ["", "### Missed bars", "", *(missed or ["None."])]
    yield f"\n![step time]({assets}/step-time.png)"


_BEST = (
    "### With the best optimizer setting of each",
    "",
    "AdamW fused, flat in polyshard unless a plugin steps it; above, all have `foreach=True`.",
    "*Kept* is polyshard with `reshard_after_forward=False`.",
)
_BEST_HEAD = ("row", "polyshard ms", "FSDP2 ms", "step / FSDP2", "bar")
_OTHERS_HEAD = ("row", "kept ms", "DDP ms", "FSDP1 ms")
_PEAK_HEAD = (
    *("row", "peak MiB", "FSDP2 MiB", "kept MiB", "DDP MiB", "FSDP1 MiB"),
    "peak / FSDP2 of the table above",
)
_BEST_NAMES, _OTHER_NAMES = ("polyshard best", "torch best"), (KEPT, *OTHERS)


def _best(rows: list[Row], found: dict[str, Found]) -> Iterator[str]:
    """Three tables: steps, those of other engines, and peaks, of the rows that have them."""
    yield from table(_BEST_HEAD, (_best_row(row, found[row.name]) for row in rows))
    for head, key, names in (
        (_OTHERS_HEAD, "median_seconds", _OTHER_NAMES),
        (_PEAK_HEAD, "resident_bytes", (*_BEST_NAMES, *_OTHER_NAMES)),
    ):
        known = [row for row in rows if any(name in found[row.name][key] for name in names)]
        if known:
            yield ""
            yield from table(head, (_others_row(row, found[row.name], key, names) for row in known))


def _best_row(row: Row, found: Found) -> tuple[str, ...]:
    times = (f"{1e3 * found['median_seconds'][name]['step']:.1f}" for name in _BEST_NAMES)
    return f"`{row.name}`", *times, _cell(row, found["ratios"], BEST_STEP), _bar(row, BEST_STEP)


def _others_row(row: Row, found: Found, key: str, names: tuple[str, ...]) -> tuple[str, ...]:
    given, is_time = found[key], key == "median_seconds"
    what, factor, form = ("step", 1e3, ".1f") if is_time else ("peak", 1 / MIB, ".0f")
    cells = [f"{factor * given[name][what]:{form}}" if name in given else "" for name in names]
    last = [] if is_time else [_cell(row, found["ratios"], FLAT_MEMORY)]
    return f"`{row.name}`", *cells, *last


def held(value: float, bar: float | None, form: str = ".2f") -> str:
    """A figure, in bold where it is above its bar."""
    return f"**{value:{form}}**" if bar is not None and value > bar else f"{value:{form}}"


def _limit(row: Row, quantity: str) -> float | None:
    return next((bar.at_most for bar in row.bars if bar.quantity == quantity), None)


def _cell(row: Row, ratios: dict[str, float], quantity: str) -> str:
    return held(ratios[quantity], _limit(row, quantity)) if quantity in ratios else ""


def _bar(row: Row, quantity: str) -> str:
    limit = _limit(row, quantity)
    return "" if limit is None else f"{limit:.2f}"


def _step_row(row: Row, found: Found) -> tuple[str, ...]:
    case, ratios = found["case"], found["ratios"]
    medians = {name: 1e3 * phases["step"] for name, phases in found["median_seconds"].items()}
    cell = partial(_cell, row, ratios)
    return (
        f"`{row.name}`",
        f"{case['width']}, {case['tokens']}, {case['ranks']}, {case['dtype']}",
        f"{medians['polyshard']:.1f}",
        f"{medians['torch']:.1f}",
        cell(STEP),
        f"{ratios[f'{STEP}, paired']:.2f}",
        _bar(row, STEP),
        cell(FLOOR),
        cell(MEMORY),
        _losses(row, found),
    )


def _losses(row: Row, found: Found) -> str:
    difference = found["losses_largest_relative_difference"]
    if found["losses_equal"]:
        return "bitwise"
    text = f"within {difference:.0e}"
    if row.losses == LOSSY:
        return f"{text} (lossy)"
    ok = row.losses == ROUNDED and difference <= CLOSE[row.case.dtype]
    return text if ok else f"**{text}**"


def _missed(row: Row, found: Found) -> Iterator[str]:
    for bar in row.bars:
        ratio = found["ratios"].get(bar.quantity)
        if ratio is not None and ratio > bar.at_most:
            reason = bar.reason or "No reason is recorded yet."
            yield f"- `{row.name}`, {bar.quantity} {ratio:.2f}, bar {bar.at_most:.2f}: {reason}"
    if _losses(row, found).startswith("**"):
        yield f"- `{row.name}`, losses: {_losses(row, found).strip('*')}, meant to be {row.losses}."
