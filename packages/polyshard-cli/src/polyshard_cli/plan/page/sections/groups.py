"""Parameter groups: what each gathers, holds and pads, and who takes which role."""

from __future__ import annotations

from polyshard.planning import readable
from polyshard_cli.plan.page.blocks import Items, Section, Table
from polyshard_cli.plan.report.document import Document, GroupFacts
from polyshard_cli.plan.report.table import frees

__all__ = ["groups_section"]


def groups_section(document: Document) -> Section:
    """Sizes of all groups, then what computes and moves them."""
    sizes = Table(
        "Sizes, of one of the groups that are alike",
        ("group", "count", "gather", "reduce", "shard", "padding", "unsharded", "frees"),
        tuple(map(_sizes, document.groups)),
    )
    words = ("mesh", "dtypes", "transport")
    rows = tuple((g.name, g.mesh, g.dtypes, g.transport) for g in document.groups)
    how = Table("How they travel", ("group", *words), rows, words)
    return Section("groups", "Parameter groups", (sizes, how, Items(_roles(document))))


def _sizes(group: GroupFacts) -> tuple[str, ...]:
    return (
        group.name,
        f"{group.count:,}",
        readable(group.gather_bytes),
        readable(group.reduce_bytes),
        readable(group.shard_bytes),
        readable(group.padding_bytes),
        readable(group.unsharded_bytes),
        frees(group.reshard_after_forward),
    )


def _roles(document: Document) -> tuple[tuple[str, str], ...]:
    """Who takes which role, and every plugin: once for all groups of which it holds."""
    found: dict[tuple[str, str], list[str]] = {}
    for group in document.groups:
        for fact in (*group.claims.items(), *(("plugin", words) for words in group.plugins)):
            found.setdefault(fact, []).append(group.name)
    return tuple(
        (role, who if len(names) == len(document.groups) else f"{who} ({', '.join(names)})")
        for (role, who), names in found.items()
    )
