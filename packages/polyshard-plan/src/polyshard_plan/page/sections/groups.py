"""Parameter groups: what each gathers, holds and pads, and who takes which role."""

from __future__ import annotations

from polyshard.group.transfers import readable
from polyshard_plan.page.blocks import Section, Table
from polyshard_plan.report.document import Document, GroupFacts

__all__ = ["groups_section"]


def groups_section(document: Document) -> Section:
    """Sizes of all groups, then what computes and moves them."""
    sizes = Table(
        "Sizes, of one of the groups that are alike",
        ("group", "count", "gather", "reduce", "shard", "padding", "unsharded", "frees"),
        tuple(map(_sizes, document.groups)),
    )
    words = ("mesh", "dtypes", "transport", "roles", "plugins")
    roles = Table("Dtypes and roles", ("group", *words), tuple(map(_roles, document.groups)), words)
    return Section("groups", "Parameter groups", (sizes, roles))


def _sizes(group: GroupFacts) -> tuple[str, ...]:
    return (
        group.name,
        f"{group.count:,}",
        readable(group.gather_bytes),
        readable(group.reduce_bytes),
        readable(group.shard_bytes),
        readable(group.padding_bytes),
        readable(group.unsharded_bytes),
        _frees(group.reshard_after_forward),
    )


def _frees(reshard_after_forward: bool | int) -> str:
    if isinstance(reshard_after_forward, bool):
        return "yes" if reshard_after_forward else "no"
    return f"to {reshard_after_forward}"


def _roles(group: GroupFacts) -> tuple[str, ...]:
    return (
        group.name,
        group.mesh,
        group.dtypes,
        group.transport,
        "; ".join(f"{role}: {who}" for role, who in group.claims.items()),
        "; ".join(group.plugins) or "none",
    )
