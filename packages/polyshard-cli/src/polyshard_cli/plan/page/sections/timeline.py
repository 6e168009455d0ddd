"""When a step computes, gathers, reduces and updates: lanes beside one another, in time."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard_cli.plan.estimate.timeline import LANES, Span
from polyshard_cli.plan.estimate.timing import Timing
from polyshard_cli.plan.page.blocks import Block, Drawing, Section, Table, Text
from polyshard_cli.plan.page.canvas import Canvas
from polyshard_cli.plan.report.document import Document

__all__ = ["milliseconds", "timeline_section"]

PHASES = ("forward", "backward", "optimizer", "plugins")


def timeline_section(document: Document) -> Section:
    """Lanes as a drawing, and what the step's time is made of as a table."""
    timing, title = document.timing, "Time of the step"
    if timing is None:
        said = "The model did not run on the meta device, so nothing is known of its time."
        return Section("time", title, (Text(said),))
    said = (
        f"An estimate for {document.machine.name}: {milliseconds(timing.step_seconds)}. Gathers "
        "and reductions run beside compute; where the first lane is empty, compute waits for them."
    )
    blocks: tuple[Block, ...] = (Text(said), _drawing(timing), _table(timing))
    return Section("time", title, blocks)


def milliseconds(seconds: float) -> str:
    """For a person."""
    return f"{seconds * 1e3:,.2f} ms"


def _drawing(timing: Timing) -> Drawing:
    shown = {span.phase for span in timing.spans}
    phases = [phase for phase in PHASES if phase in shown]

    def draw(canvas: Canvas) -> None:
        for number, phase in enumerate(phases):
            for row, lane in enumerate(LANES):
                bars = _bars([s for s in timing.spans if (s.lane, s.phase) == (lane, phase)])
                canvas.axes.broken_barh(
                    bars, (row - 0.35, 0.7), facecolor=canvas.colour(number), edgecolor="none"
                )
            canvas.axes.barh(0, 0, color=canvas.colour(number), label=phase)
        canvas.lanes(LANES)
        canvas.axes.set_xlim(0, timing.step_seconds * 1e3 or 1)
        canvas.axes.set_xlabel("milliseconds from the start of the step")
        canvas.legend(3)

    title = (
        "Timeline of a step: "
        f"{milliseconds(timing.compute_seconds)} of forward and backward, "
        f"{milliseconds(timing.gather_seconds)} of gathers, "
        f"{milliseconds(timing.reduce_seconds)} of reductions, "
        f"{milliseconds(timing.optimizer_seconds)} of the optimizer"
    )
    return Drawing("timeline-picture", title, draw, 4)


def _bars(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Start and length in milliseconds, a hair short so that neighbours are told apart."""
    return [(span.start * 1e3, 0.985e3 * (span.end - span.start)) for span in spans]


def _table(timing: Timing) -> Table:
    rows = [
        ("forward and backward", timing.compute_seconds),
        ("optimizer", timing.optimizer_seconds),
        ("gathers", timing.gather_seconds),
        ("reductions", timing.reduce_seconds),
        *((f"not overlapped: {what}", seconds) for what, seconds in timing.exposed),
        ("step", timing.step_seconds),
    ]
    shown = tuple((name, f"{seconds * 1e3:,.2f}") for name, seconds in rows)
    caption = "What the time goes into; parts overlap, so they come to more than the step"
    return Table(caption, ("part", "ms"), shown, has_total=True)
