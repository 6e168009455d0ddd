"""The plan as sections, for a terminal and for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from polyshard.planning import readable
from polyshard_cli.plan.estimate.memory import PARTS, Memory
from polyshard_cli.plan.estimate.timing import LANES
from polyshard_cli.plan.page.blocks import Bar, Bars, Block, Items, Section, Table, Text, stacked
from polyshard_cli.plan.page.html import render
from polyshard_cli.plan.report.document import Document, GroupFacts

NEAR = 0.2
"""A limit that the peak is this part of, or more, is drawn; a farther one is a line of text."""
PHASES = ("forward", "backward", "optimizer", "plugins")
READING = (
    ("Bytes", "exact for the engine's own transfers; for sums over replicas and collectives of "
     "tensor parallelism, those of a ring."),
    ("Memory", "without the device's context, fragmentation and workspaces of libraries; the loss "
     "is taken to be cross entropy in float32, attention one that never holds its scores."),
    ("Time", "arithmetic over the machine's figures, kernel by kernel: what limits a step, not a "
     "promise."),
)  # fmt: skip


def plan_page(document: Document, more: Sequence[Section] = ()) -> str:
    """``document`` as one page of HTML; ``more`` sections come first."""
    sections = (*more, *plan_sections(document))
    return render(f"Plan of {document.model.name}", lead_of(document), sections)


def lead_of(document: Document) -> str:
    """The model and the mesh, in a sentence."""
    model, mesh = document.model, document.mesh
    axes = ", ".join(f"{axis.name} = {axis.size} ({axis.role})" for axis in mesh.axes)
    return (
        f"{model.name}: {model.parameters:,} parameters in {model.units} units, on {mesh.ranks:,} "
        f"ranks ({axes}). A step of {model.step} a rank, {model.optimizer}; bytes are those of "
        f"rank {model.rank}."
    )


def plan_sections(document: Document, *, parameters: bool = False) -> tuple[Section, ...]:
    """What a plan says; ``parameters`` adds every parameter by dim and by axis."""
    notices = tuple((notice.code, notice.message) for notice in document.notices)
    nothing = Text("Nothing stands out in this plan.")
    return (
        Section("memory", "Memory over the step", tuple(_memory(document))),
        Section("time", "Time of the step", tuple(_time(document))),
        Section("traffic", "Traffic by axis", tuple(_traffic(document))),
        Section("groups", "Groups", tuple(_groups(document, parameters=parameters))),
        Section("notices", "What to look at", (Items(notices) if notices else nothing,)),
        Section("assumptions", "Assumptions and sources", tuple(_assumptions(document))),
    )


def _memory(document: Document) -> Iterator[Block]:
    memory, size = document.memory, document.machine.memory_bytes
    peak = memory.peak
    said = f"Most is held in {peak.name}{f', while {peak.at} runs' if peak.at else ''}: "
    said += readable(peak.total)
    if size:
        part = "less than 0.1%" if peak.total < size / 1000 else f"{peak.total / size:.1%}"
        said += f", {part} of the {readable(size)} of a device of {document.machine.name}"
    yield Text(f"{said}. Each phase is shown at the moment at which the device holds most.")
    yield _memory_bars(memory, size if peak.total >= NEAR * size else 0)
    columns = ("kind", *(phase.name for phase in memory.phases))
    rows = [
        (part, *(readable(getattr(phase, part)) for phase in memory.phases))
        for part in (*PARTS, "total")
    ]
    yield Table("Memory of a device by phase", columns, tuple(rows), has_total=True)
    if memory.tiers:
        away = [
            (tier, part, readable(nbytes))
            for tier, parts in memory.tiers.items()
            for part, nbytes in parts.items()
        ]
        yield Table("What rests elsewhere", ("tier", "what", "size"), tuple(away), ("what",))


def _memory_bars(memory: Memory, limit: int) -> Bars:
    unit, name = unit_of(max(memory.peak.total, limit))
    parts = {(p.name, part): getattr(p, part) / unit for p in memory.phases for part in PARTS}
    words = ", ".join(f"{phase.name} {readable(phase.total)}" for phase in memory.phases)
    title = f"Memory of a device by phase and kind: {words}"
    line = (limit / unit, "the device's memory") if limit else None
    rows = tuple(phase.name for phase in memory.phases)
    return Bars("memory-picture", title, rows, PARTS, stacked(parts, rows, PARTS), name, line)


def _time(document: Document) -> Iterator[Block]:
    timing = document.timing
    if timing is None:
        yield Text("The model did not run on the meta device, so nothing is known of its time.")
        return
    busy = timing.compute_seconds + timing.optimizer_seconds
    yield Text(
        f"An estimate for {document.machine.name}: {milliseconds(timing.step_seconds)}, of which "
        f"{milliseconds(busy)} compute. Gathers and reductions run beside compute; where the first "
        "lane is empty, compute waits for them."
    )
    shown = {span.phase for span in timing.spans}
    phases = tuple(phase for phase in PHASES if phase in shown)
    bars = tuple(
        Bar(LANES.index(s.lane), s.start * 1e3, (s.end - s.start) * 1e3, phases.index(s.phase))
        for s in timing.spans
    )
    rows = [
        ("forward and backward", timing.compute_seconds),
        ("optimizer", timing.optimizer_seconds),
        ("gathers", timing.gather_seconds),
        ("reductions", timing.reduce_seconds),
        *((f"not overlapped: {what}", seconds) for what, seconds in timing.exposed),
        ("step", timing.step_seconds),
    ]
    words = ", ".join(f"{milliseconds(seconds)} of {what}" for what, seconds in rows[:4])
    axis = "milliseconds from the start of the step"
    yield Bars("timeline-picture", f"Timeline of a step: {words}", LANES, phases, bars, axis)
    caption = "Time by part; parts overlap, so their sum exceeds the step"
    cells = tuple((name, f"{seconds * 1e3:,.2f}") for name, seconds in rows)
    yield Table(caption, ("part", "ms"), cells, has_total=True)


def milliseconds(seconds: float) -> str:
    """For a person."""
    return f"{seconds * 1e3:,.2f} ms"


def _traffic(document: Document) -> Iterator[Block]:
    if not document.traffic:
        yield Text("Nothing travels: no axis has a second rank.")
        return
    yield Text(
        f"Rank {document.model.rank} sends {readable(sum(t.sent_bytes for t in document.traffic))}"
        f" in a step; polyshard.stats(model) counts {document.counted_bytes:,} bytes of it."
    )
    yield _traffic_bars(document)
    rows = []
    for t in document.traffic:
        numbers = f"{t.calls:,}", f"{t.sent_bytes:,}"
        rows.append((t.unit, t.collective, t.axis, t.phase, *numbers, _short(t.payer)))
    columns = ("by", "what", "axis", "phase", "calls", "bytes", "paid by")
    yield Table(
        "Every transfer of a step", columns, tuple(rows), ("what", "axis", "phase", "paid by")
    )


def _traffic_bars(document: Document) -> Bars:
    """By axis, and by collective and payer."""
    sums: Counter[tuple[str, str]] = Counter()
    for one in document.traffic:
        sums[one.axis, f"{one.collective}, {_short(one.payer)}"] += one.sent_bytes
    axes, kinds = (tuple(dict.fromkeys(key[place] for key in sums)) for place in (0, 1))
    unit, name = unit_of(max(sums.values()))
    bars = stacked({key: nbytes / unit for key, nbytes in sums.items()}, axes, kinds)
    words = "; ".join(f"{axis}, {kind}: {readable(n)}" for (axis, kind), n in sums.items())
    title = f"Bytes sent in a step by axis, collective and payer: {words}"
    return Bars("traffic-picture", title, axes, kinds, bars, f"{name} sent by a rank")


def _short(payer: str) -> str:
    """Without its settings."""
    return payer.partition("(")[0]


def _groups(document: Document, *, parameters: bool) -> Iterator[Block]:
    sizes = ("gather", "reduce", "shard", "padding", "unsharded")
    rows = []
    for group in document.groups:
        shown = [readable(getattr(group, f"{what}_bytes")) for what in sizes]
        rows.append((group.name, f"{group.count:,}", *shown, frees(group.reshard_after_forward)))
    caption = "Sizes, of one of the groups that are alike"
    yield Table(caption, ("group", "count", *sizes, "frees"), tuple(rows))
    if parameters:
        yield from map(_parameters, document.groups)
    found: dict[tuple[str, str], list[str]] = {}
    for group in document.groups:
        facts = {"mesh": group.mesh, "dtypes": group.dtypes, "transport": group.transport}
        plugins = [("plugin", words) for words in group.plugins]
        for fact in (*facts.items(), *group.claims.items(), *plugins):
            found.setdefault(fact, []).append(group.name)
    yield Items(
        tuple(
            (role, who if len(names) == len(document.groups) else f"{who} ({', '.join(names)})")
            for (role, who), names in found.items()
        )
    )


def frees(reshard_after_forward: bool | int) -> str:
    """Whether a unit is freed after its forward: yes, no, or to so many ranks."""
    if isinstance(reshard_after_forward, bool):
        return "yes" if reshard_after_forward else "no"
    return f"to {reshard_after_forward}"


def _parameters(group: GroupFacts) -> Table:
    words = {"Replicate()": "whole"} | {f"Shard({dim})": f"dim {dim}" for dim in range(8)}
    rows = []
    for parameter in group.parameters:
        name = parameter.name.removeprefix(f"{group.name}.")
        by_dim = (
            f"{cut.size}/{'/'.join(cut.axes)}={cut.local}" if cut.axes else str(cut.size)
            for cut in parameter.by_dim
        )
        by_axis = (f"{axis}: {words.get(w, w)}" for axis, w in parameter.by_axis.items())
        padding = readable(parameter.padding_bytes) if parameter.padding_bytes else "-"
        rows.append((name, " x ".join(by_dim) or "scalar", ", ".join(by_axis), padding))
    columns = ("parameter", "by dim", "by axis", "padding")
    return Table(f"{group.name} ({group.count})", columns, tuple(rows), ("by dim", "by axis"))


def _assumptions(document: Document) -> Iterator[Block]:
    model, machine = document.model, document.machine
    facts = {
        "machine": f"{machine.name}, {machine.backend}",
        "trainable parameters": f"{model.trainable:,}",
        "versions": f"polyshard {document.polyshard}, torch {document.torch}",
    }
    sources = (("", source) for source in machine.sources)
    yield Items((*facts.items(), *READING, *sources))


def unit_of(largest: int) -> tuple[int, str]:
    """The largest unit of which there is at least one in ``largest`` bytes: its size, its name."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1 << 10 * power:
            return 1 << 10 * power, name
    return 1, "bytes"
