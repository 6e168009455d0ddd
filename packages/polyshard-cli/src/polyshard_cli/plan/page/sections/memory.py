"""Memory of a device in each phase of the step, by kind, with what the device has."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard.planning import readable
from polyshard_cli.plan.estimate.memory import Memory, Phase
from polyshard_cli.plan.page.blocks import Block, Drawing, Section, Table, Text
from polyshard_cli.plan.page.canvas import Canvas, unit_of
from polyshard_cli.plan.report.document import Document

__all__ = ["memory_section"]

KINDS = ("parameters", "gradients", "optimizer", "unsharded", "activations", "transfers")
NEAR = 0.2
"""A limit that the peak is this part of, or more, is drawn; a farther one is said."""


def memory_section(document: Document) -> Section:
    """A drawing, the same as a table, and what rests on other tiers."""
    memory, size = document.memory, document.machine.memory_bytes
    blocks: list[Block] = [Text(_said(memory, size, document.machine.name))]
    blocks.append(_drawing(memory.phases, size if memory.peak.total >= NEAR * size else 0))
    blocks.append(_table(memory.phases))
    if memory.tiers:
        blocks.append(_tiers(memory))
    return Section("memory", "Memory over the step", tuple(blocks))


def _said(memory: Memory, size: int, machine: str) -> str:
    peak = memory.peak
    said = f"Most is held in {peak.name}"
    said += f", while {peak.at} runs: " if peak.at else ": "
    said += readable(peak.total)
    if size:
        said += f", {_part(peak.total, size)} of the {readable(size)} of a device of {machine}"
    return f"{said}. Each phase is shown at the moment at which the device holds most."


def _part(nbytes: int, size: int) -> str:
    return "less than 0.1%" if nbytes < size / 1000 else f"{nbytes / size:.1%}"


def _drawing(phases: Sequence[Phase], limit: int) -> Drawing:
    largest = max(phase.total for phase in phases)
    unit, name = unit_of(max(largest, limit))

    def draw(canvas: Canvas) -> None:
        axes, offsets = canvas.axes, [0.0] * len(phases)
        for number, kind in enumerate(KINDS):
            sizes = [getattr(phase, kind) / unit for phase in phases]
            rows = range(len(phases))
            colour = canvas.colour(number)
            axes.barh(rows, sizes, left=offsets, height=0.7, color=colour, label=kind)
            offsets = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        if limit:
            canvas.limit(limit / unit, "the device's memory")
        canvas.lanes([phase.name for phase in phases])
        axes.set_xlabel(name)
        canvas.legend(7)

    words = ", ".join(f"{phase.name} {readable(phase.total)}" for phase in phases)
    return Drawing("memory-picture", f"Memory of a device by phase and kind: {words}", draw, 6)


def _table(phases: Sequence[Phase]) -> Table:
    rows = [
        (part, *(readable(getattr(phase, part)) for phase in phases)) for part in (*KINDS, "total")
    ]
    columns = ("kind", *(phase.name for phase in phases))
    return Table("Memory of a device by phase", columns, tuple(rows), has_total=True)


def _tiers(memory: Memory) -> Table:
    rows = [
        (tier, part, readable(nbytes))
        for tier, parts in memory.tiers.items()
        for part, nbytes in parts.items()
    ]
    return Table("What rests elsewhere", ("tier", "what", "size"), tuple(rows), ("what",))
