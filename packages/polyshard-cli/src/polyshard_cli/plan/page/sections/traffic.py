"""What a rank sends in a step: by mesh axis, and by who pays."""

from __future__ import annotations

from collections.abc import Mapping

from polyshard.planning import readable
from polyshard_cli.plan.page.blocks import Block, Drawing, Section, Table, Text
from polyshard_cli.plan.page.canvas import Canvas, unit_of
from polyshard_cli.plan.report.document import Document

__all__ = ["traffic_section"]


def traffic_section(document: Document) -> Section:
    """Bars by axis, and every kind of transfer as a table."""
    title = "Traffic by axis"
    if not document.traffic:
        return Section("traffic", title, (Text("Nothing travels: no axis has a second rank."),))
    total = sum(t.sent_bytes for t in document.traffic)
    said = (
        f"Rank {document.model.rank} sends {readable(total)} in a step; "
        f"polyshard.stats(model) counts {document.counted_bytes:,} bytes of it."
    )
    blocks: tuple[Block, ...] = (Text(said), _drawing(document), _table(document))
    return Section("traffic", title, blocks)


def _drawing(document: Document) -> Drawing:
    sums = _sums(document)
    axes_names = list(dict.fromkeys(axis for axis, _ in sums))
    kinds = list(dict.fromkeys(kind for _, kind in sums))
    unit, name = unit_of(max(sums.values()))

    def draw(canvas: Canvas) -> None:
        offsets = [0.0] * len(axes_names)
        for number, kind in enumerate(kinds):
            sizes = [sums.get((axis, kind), 0) / unit for axis in axes_names]
            colour, rows = canvas.colour(number), range(len(axes_names))
            canvas.axes.barh(rows, sizes, left=offsets, height=0.7, color=colour, label=kind)
            offsets = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        canvas.lanes(axes_names)
        canvas.axes.set_xlabel(f"{name} sent by a rank in a step")
        canvas.legend(4, narrow=1)

    words = "; ".join(f"{axis}, {kind}: {readable(n)}" for (axis, kind), n in sums.items())
    title = f"Bytes sent in a step by axis, collective and payer: {words}"
    return Drawing("traffic-picture", title, draw, len(axes_names) + len(kinds) / 2 + 1)


def _sums(document: Document) -> Mapping[tuple[str, str], int]:
    """Bytes by axis, and by collective and payer."""
    found: dict[tuple[str, str], int] = {}
    for one in document.traffic:
        key = (one.axis, f"{one.collective}, {short(one.payer)}")
        found[key] = found.get(key, 0) + one.sent_bytes
    return found


def short(payer: str) -> str:
    """Without its settings."""
    return payer.partition("(")[0]


def _table(document: Document) -> Table:
    rows = tuple(
        (
            one.unit,
            one.collective,
            one.axis,
            one.phase,
            f"{one.calls:,}",
            f"{one.sent_bytes:,}",
            short(one.payer),
        )
        for one in document.traffic
    )
    return Table(
        "Every transfer of a step",
        ("by", "what", "axis", "phase", "calls", "bytes sent", "paid by"),
        rows,
        ("what", "axis", "phase", "paid by"),
    )
