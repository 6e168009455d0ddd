"""Sections for a terminal: text, lists and tables; pictures are for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import table as rich
from rich import text
from rich.console import Console, Group, RenderableType

from polyshard_cli.plan.page.blocks import Items, Section, Table, Text

WIDTH = 80
LONGEST = 240
"""Characters of one item."""


def show(lead: str, sections: Sequence[Section], console: Console) -> None:
    """Print ``lead`` and ``sections``."""
    console.print(Group(text.Text(lead), *(one for s in sections for one in _shown(s))))


def _shown(section: Section) -> Iterator[RenderableType]:
    yield text.Text(f"\n{section.title}", style="bold")
    for block in section.blocks:
        if isinstance(block, Text):
            yield text.Text(block.words)
        elif isinstance(block, Items):
            for name, words in block.items:
                said = f"{name}: {words}" if name else words
                cut = f"{said[:LONGEST]}... (all of it with --json)"
                yield text.Text(said if len(said) <= LONGEST else cut)
        elif isinstance(block, Table):
            yield _table(block)


def _table(table: Table) -> rich.Table:
    made = rich.Table(title=table.caption, title_justify="left", box=None, padding=(0, 1))
    for place, column in enumerate(table.columns):
        is_words = not place or column in table.words
        made.add_column(
            column,
            justify="left" if is_words else "right",
            overflow="fold",
            no_wrap=not is_words,  # a number that goes on in the next line reads as another
        )
    last = len(table.rows) - 1
    for place, row in enumerate(table.rows):
        stands_out = place in table.marked or (table.has_total and place == last)
        made.add_row(*row, style="bold" if stands_out else None)
    return made
