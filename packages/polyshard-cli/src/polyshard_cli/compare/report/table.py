"""The comparison as a table for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyshard.planning import readable
from polyshard_cli.compare.report.document import Comparison, Result

__all__ = ["WIDTH", "show"]

WIDTH = 80
LONGEST = 26
"""Characters of an engine's name in a line."""
COLUMNS = ("engine", "step ms", "ratio", "peak", "sent", "loss", "difference")


def show(found: Comparison, console: Console) -> None:
    """Print ``found``."""
    console.print(Group(*_parts(found)))


def _parts(found: Comparison) -> Iterator[RenderableType]:
    yield _head(found)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        left = column == "engine"
        table.add_column(column, justify="left" if left else "right", no_wrap=not left)
    for result in found.results:
        table.add_row(*_row(found, result))
    yield table
    for result in found.results:
        if result.error is not None:
            yield Text(f"{result.name}: {_where(result)}{result.error.message}", style="red")
    if found.reference is not None:
        yield Text(" ".join(_notes(found)), style="dim")


def _head(found: Comparison) -> Text:
    settings, job = found.settings, found.job
    size = f"{job.parameters:,} parameters in {job.units} units, " if job is not None else ""
    way = "one engine after the other" if settings.sequential else "engines in turns"
    return Text(
        f"{settings.job}: {size}{settings.ranks} ranks on {settings.device}, {settings.steps} "
        f"steps after {settings.warmup}, {way}"
    )


def _row(found: Comparison, result: Result) -> tuple[str, ...]:
    name = "\n".join(_lines(result.name))
    if result.timing is None or result.losses is None:
        return name, "failed", "", "", "", "", ""
    losses, sent = result.losses, result.sent_bytes
    return (
        name,
        f"{1e3 * result.timing.median_seconds:,.1f}",
        f"{result.timing.ratio:.2f}",
        readable(result.peak_bytes),
        "unknown" if sent is None else readable(sent),
        f"{losses.steps[-1]:.4f}",
        _difference(found, result),
    )


def _difference(found: Comparison, result: Result) -> str:
    assert result.losses is not None
    if result.name == found.reference:
        return "-"
    return "none" if result.losses.bitwise else f"{result.losses.largest_difference:.1e}"


def _where(result: Result) -> str:
    assert result.error is not None
    step = "while building" if result.error.step is None else f"in step {result.error.step + 1}"
    return f"failed {step} on rank {result.error.rank}: "


def _notes(found: Comparison) -> Iterator[str]:
    yield (
        f"Compared with {found.reference}: medians of the slowest rank's step; peak memory beyond "
        "that of a process without a model, bytes sent in a step (of the rank with most); the "
        'loss of the last step; the largest difference of losses ("none": bitwise equal).'
    )
    if any(one.with_build for result in found.results for one in result.memory):
        yield "Here the peak includes building the whole model: the system cannot reset it."
    if any(result.name == "single" for result in found.results):
        yield f"single: one process for the batches of {found.settings.ranks} ranks."
    if found.settings.device == "cpu" and any(
        result.wire_bytes is None and result.timing for result in found.results
    ):
        yield "This system does not count sent bytes; the table has those that polyshard counts."


def _lines(name: str) -> Iterator[str]:
    """A long name, broken before options."""
    line = ""
    for index, part in enumerate(name.split("+")):
        piece = f"+{part}" if index else part
        if line and len(line) + len(piece) > LONGEST:
            yield line
            line = "  "
        line += piece
    yield line
