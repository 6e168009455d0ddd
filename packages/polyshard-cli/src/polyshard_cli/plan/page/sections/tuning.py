"""The front of a search: settings of which none takes both less memory and less time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyshard.planning import readable
from polyshard_cli.plan.page.blocks import Drawing, Section, Table, Text
from polyshard_cli.plan.page.canvas import Canvas
from polyshard_cli.plan.page.sections.timeline import milliseconds

__all__ = ["Point", "tuning_section"]

GIB = 1 << 30


@dataclass(frozen=True)
class Point:
    """One setting that was looked at."""

    name: str
    memory_bytes: int
    """Peak of a device."""
    seconds: float
    """Of a step."""
    is_chosen: bool = False


def tuning_section(points: Sequence[Point], *, limit_bytes: int = 0) -> Section:
    """Memory against time, as a drawing and a table.

    Args:
        points: of the front, or all that were looked at; at least one.
        limit_bytes: the memory that a setting may take; 0 for no limit.
    """
    ordered = sorted(points, key=lambda point: (point.memory_bytes, point.seconds))
    chosen = [point for point in ordered if point.is_chosen]

    def draw(canvas: Canvas) -> None:
        others = [point for point in ordered if not point.is_chosen]
        for number, (label, some) in enumerate((("looked at", others), ("chosen", chosen))):
            canvas.axes.plot(
                [point.memory_bytes / GIB for point in some],
                [point.seconds * 1e3 for point in some],
                "D" if number else "o",
                color=canvas.colour(number),
                label=label,
            )
        if limit_bytes:
            canvas.limit(limit_bytes / GIB, "the limit")
        canvas.axes.grid()
        canvas.axes.set_xlabel("GiB of a device at its peak")
        canvas.axes.set_ylabel("milliseconds of a step")
        canvas.legend(3)

    said = f"{len(ordered)} settings"
    if chosen:
        best = chosen[0]
        said += f"; {best.name} was chosen: {milliseconds(best.seconds)} a step"
        said += f" in {readable(best.memory_bytes)}"
    table = Table(
        "Settings by memory",
        ("setting", "memory", "ms a step", "choice"),
        tuple(
            (
                point.name,
                readable(point.memory_bytes),
                f"{point.seconds * 1e3:,.2f}",
                "chosen" if point.is_chosen else "",
            )
            for point in ordered
        ),
    )
    title = f"Memory against time of {said}"
    drawing = Drawing("tuning-picture", title, draw, 8)
    return Section("tuning", "The tuning front", (Text(f"{said}."), drawing, table))
