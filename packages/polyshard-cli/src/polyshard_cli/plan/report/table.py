"""The plan as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyshard.planning import readable
from polyshard_cli.plan.dry_run.planning import Cut, PlannedParameter
from polyshard_cli.plan.report.document import Document, GroupFacts

__all__ = ["frees", "show"]

WIDTH = 80
LONGEST = 240
"""Characters of what is said of a plugin."""


def show(document: Document, console: Console, *, parameters: bool = False) -> None:
    """Print ``document``; ``parameters`` adds every parameter by dim and by axis."""
    console.print(Group(*_parts(document, parameters=parameters)))


def _parts(document: Document, *, parameters: bool) -> Iterator[RenderableType]:
    yield _head(document)
    yield _groups(document)
    yield _memory(document)
    yield _traffic(document)
    if document.timing is not None:
        yield _timing(document)
    if parameters:
        for group in document.groups:
            yield _parameters(group)
    yield from _claims(document)
    for notice in document.notices:
        yield Text(f"warning ({notice.code}): {notice.message}", style="yellow")


def _head(document: Document) -> Text:
    model, mesh = document.model, document.mesh
    axes = " x ".join(f"{axis.name}={axis.size} ({axis.role})" for axis in mesh.axes)
    return Text(
        f"{model.name}: {model.parameters:,} parameters in {model.units} units, on {mesh.ranks:,} "
        f"ranks: {axes}. A step of {model.step} a rank, "
        f"{model.optimizer}; bytes are those of rank {model.rank}."
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    for index, column in enumerate(columns):
        justify = "left" if index == 0 else "right"
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _groups(document: Document) -> Table:
    table = _table(
        "Groups", "group", "count", "gather", "reduce", "shard", "padding", "unsharded", "frees"
    )
    for group in document.groups:
        table.add_row(
            group.name,
            str(group.count),
            readable(group.gather_bytes),
            readable(group.reduce_bytes),
            readable(group.shard_bytes),
            readable(group.padding_bytes),
            readable(group.unsharded_bytes),
            frees(group.reshard_after_forward),
        )
    return table


def frees(reshard_after_forward: bool | int) -> str:
    """Whether a unit is freed after its forward: yes, no, or to so many ranks."""
    if isinstance(reshard_after_forward, bool):
        return "yes" if reshard_after_forward else "no"
    return f"to {reshard_after_forward}"


def _memory(document: Document) -> Group:
    table = _table("Memory of a device", "", *(phase.name for phase in document.memory.phases))
    for part in (
        "parameters",
        "gradients",
        "optimizer",
        "unsharded",
        "activations",
        "transfers",
        "total",
    ):
        values = [getattr(phase, part) for phase in document.memory.phases]
        style = "bold" if part == "total" else None
        table.add_row(part, *map(readable, values), style=style)
    lines: list[RenderableType] = [table]
    for tier, parts in document.memory.tiers.items():
        said = ", ".join(f"{part} {readable(nbytes)}" for part, nbytes in parts.items())
        lines.append(Text(f"on {tier}: {said}"))
    return Group(*lines)


def _traffic(document: Document) -> Table:
    table = _table("Sent in a step", "by", "what", "axis", "phase", "calls", "bytes", "paid by")
    for one in document.traffic:
        table.add_row(
            one.unit,
            one.collective,
            one.axis,
            one.phase,
            str(one.calls),
            readable(one.sent_bytes),
            one.payer.partition("(")[0],
        )
    return table


def _timing(document: Document) -> Group:
    timing = document.timing
    assert timing is not None
    table = _table(f"Time of a step on {document.machine.name}", "part", "ms")
    for name, seconds in (
        ("forward and backward", timing.compute_seconds),
        ("optimizer", timing.optimizer_seconds),
        ("gathers", timing.gather_seconds),
        ("reductions", timing.reduce_seconds),
        *((f"  not overlapped: {what}", seconds) for what, seconds in timing.exposed),
    ):
        table.add_row(name, f"{seconds * 1e3:,.2f}")
    table.add_row("step", f"{timing.step_seconds * 1e3:,.2f}", style="bold")
    return Group(table)


def _parameters(group: GroupFacts) -> Table:
    table = _table(f"{group.name} ({group.count})", "parameter", "by dim", "by axis", "padding")
    for parameter in group.parameters:
        table.add_row(
            parameter.name.removeprefix(f"{group.name}."),
            " x ".join(_cut(cut) for cut in parameter.by_dim) or "scalar",
            ", ".join(f"{axis}: {_short(what)}" for axis, what in parameter.by_axis.items()),
            _padding(parameter),
        )
    return table


def _cut(cut: Cut) -> str:
    return f"{cut.size}/{'/'.join(cut.axes)}={cut.local}" if cut.axes else str(cut.size)


def _short(what: str) -> str:
    return "whole" if what == "Replicate()" else f"dim {what.removeprefix('Shard(')[:-1]}"


def _padding(parameter: PlannedParameter) -> str:
    return readable(parameter.padding_bytes) if parameter.padding_bytes else "-"


def _claims(document: Document) -> Iterator[Text]:
    """Which plugin takes which role, said once for all groups of which it holds."""
    facts: dict[str, list[str]] = {}
    for group in document.groups:
        roles = ", ".join(f"{role} {who}" for role, who in group.claims.items())
        for fact in (
            f"transport {group.transport}, {roles}",
            *map("plugin {}".format, group.plugins),
        ):
            facts.setdefault(fact, []).append(group.name)
    for fact, names in facts.items():
        where = "" if len(names) == len(document.groups) else f" [{', '.join(names)}]"
        shown = fact if len(fact) <= LONGEST else f"{fact[:LONGEST]}... (all of it with --json)"
        yield Text(f"{shown}{where}", style="dim")
