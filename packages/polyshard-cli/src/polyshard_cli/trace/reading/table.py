"""Tables of a trace for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyshard.planning import readable
from polyshard_cli.trace.reading.merging import Merged
from polyshard_cli.trace.reading.summary import Row, Summary

__all__ = ["WIDTH", "show_merged", "show_summary"]

WIDTH = 80
LONGEST = 28  # characters of a unit's name


def show_merged(merged: Merged, console: Console) -> None:
    """Print how clocks were aligned, and where the file is."""
    table = _table("Clocks, in rank 0's", "rank", "host", "offset µs", "± µs", "drift ppm", "spans")
    for one in merged.ranks:
        unsure = "unknown" if one.uncertainty_us is None else f"{one.uncertainty_us:,.1f}"
        numbers = f"{one.offset_us:,.1f}", unsure, f"{one.drift_ppm:+.2f}", f"{one.events:,}"
        table.add_row(str(one.rank), _short(one.host), *numbers)
    console.print(table)
    if any(one.uncertainty_us is None for one in merged.ranks):
        console.print(
            "Clocks were not compared (train inside of trace.recording(model)): wall clocks had "
            "to do."
        )
    if merged.missing:
        console.print(f"Ranks without a file: {', '.join(map(str, merged.missing))}")
    console.print(f"{merged.path}: open it in https://ui.perfetto.dev", soft_wrap=True)


def show_summary(summary: Summary, console: Console, most: int) -> None:
    """Print ``summary``, with so many rows of units at most."""
    console.print(Group(*_parts(summary, most)))


def _parts(summary: Summary, most: int) -> Iterator[RenderableType]:
    turns = summary.rank_steps
    each = f", {1e3 * summary.step_seconds / turns:,.2f} ms each" if turns else ""
    yield Text(
        f"{summary.steps} steps on {summary.ranks} ranks{each}. Times and bytes are per "
        "step and rank. A transfer lasts from its start to the end of the wait for it; the wait is "
        "the part that computation did not hide."
        + (" Some ranks recorded fewer steps." if turns < summary.ranks * summary.steps else "")
    )
    yield _rows("By kind", summary.kinds, max(1, turns))
    yield _rows("By unit, longest wait first", summary.rows[:most], max(1, turns))
    if len(summary.rows) > most:
        yield Text(f"and {len(summary.rows) - most} more; --rows shows them")


def _rows(title: str, rows: Sequence[Row], turns: int) -> Table:
    table = _table(title, "unit", "kind", "calls", "ms", "waited ms", "bytes", "rate")
    for row in rows:
        waited = "" if row.waited_seconds is None else f"{1e3 * row.waited_seconds / turns:,.2f}"
        moved = "" if row.sent_bytes is None else readable(round(row.sent_bytes / turns))
        speed = row.bytes_per_second
        rate = "" if speed is None else f"{readable(round(speed))}/s"
        numbers = f"{row.calls / turns:,.4g}", f"{1e3 * row.seconds / turns:,.2f}", waited
        table.add_row(_short(row.name), row.kind, *numbers, moved, rate)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    for column in columns:
        left = column in ("unit", "kind", "host")
        table.add_column(column, justify="left" if left else "right", no_wrap=not left)
    return table


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"...{name[3 - LONGEST :]}"
