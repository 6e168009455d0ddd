"""What to look at before running the plan."""

from __future__ import annotations

from polyshard_cli.plan.page.blocks import Items, Section, Text
from polyshard_cli.plan.report.document import Document

__all__ = ["notices_section"]


def notices_section(document: Document) -> Section:
    """All warnings, or that there is none."""
    title = "What to look at"
    if not document.notices:
        return Section("notices", title, (Text("Nothing stands out in this plan."),))
    items = tuple((notice.code, notice.message) for notice in document.notices)
    return Section("notices", title, (Items(items),))
