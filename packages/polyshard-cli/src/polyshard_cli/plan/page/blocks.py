"""What a section is made of: text, lists, tables, bars and plots, as data; in a terminal, words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import table as rich
from rich import text
from rich.console import Console, Group, RenderableType


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str


@dataclass(frozen=True)
class Items:
    """A list; an item may have a name before its words, or an empty one."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Rows whose first cell names them."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...] = ()
    """Columns that hold words; all but these and the first hold numbers."""
    has_total: bool = False
    """Whether the last row is what the others come to."""
    marked: tuple[int, ...] = ()
    """Rows that stand out."""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.caption


@dataclass(frozen=True)
class Bar:
    """A piece of a row, from ``start`` on."""

    row: int
    start: float
    length: float
    series: int


@dataclass(frozen=True)
class Bars:
    """Rows of bars, in the unit of the axis below them. The page shows it, a terminal does not."""

    name: str
    """A word, of which a page has only one."""
    title: str
    """What it shows: read aloud where it cannot be seen."""
    rows: tuple[str, ...]
    series: tuple[str, ...]
    bars: tuple[Bar, ...]
    axis: str
    limit: tuple[float, str] | None = None
    """A line across that nothing should pass, and what it is."""


def stacked(
    values: Mapping[tuple[str, str], float], rows: Sequence[str], series: Sequence[str]
) -> tuple[Bar, ...]:
    """Of each row its series, one behind the other; ``values`` by row and series."""
    bars = []
    for place, row in enumerate(rows):
        start = 0.0
        for number, kind in enumerate(series):
            bars.append(Bar(place, start, values.get((row, kind), 0.0), number))
            start += bars[-1].length
    return tuple(bars)


@dataclass(frozen=True)
class Series:
    """Points of a plot; ``is_line``: joined."""

    label: str
    points: tuple[tuple[float, float], ...]
    is_line: bool = False


@dataclass(frozen=True)
class Plot:
    """Points over two axes. The page shows it, a terminal does not."""

    name: str
    title: str
    series: tuple[Series, ...]
    across: str
    up: str
    limit: tuple[float, str] | None = None


Block = Text | Items | Table | Bars | Plot


@dataclass(frozen=True)
class Section:
    """A part of a report with a heading of its own."""

    name: str
    """A word, of which a page has only one: it is linked by it."""
    title: str
    blocks: tuple[Block, ...]


WIDTH = 80
LONGEST = 240
"""Characters of one item."""


def show(lead: str, sections: Sequence[Section], console: Console) -> None:
    """Print ``lead`` and ``sections``: text, lists and tables; pictures are for the page."""
    console.print(Group(text.Text(lead), *(one for s in sections for one in _shown(s))))


def _shown(section: Section) -> Iterator[RenderableType]:
    yield text.Text(f"\n{section.title}", style="bold")
    for block in section.blocks:
        if isinstance(block, Text):
            yield text.Text(block.words)
        elif isinstance(block, Items):
            for name, words in block.items:
                said = f"{name}: {words}" if name else words
                more = "... (all of it with --json)" if len(said) > LONGEST else ""
                yield text.Text(said[:LONGEST] + more)
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
            no_wrap=not is_words,  # a number that wraps into the next line reads as another
        )
    last = len(table.rows) - 1
    for place, row in enumerate(table.rows):
        stands_out = place in table.marked or (table.has_total and place == last)
        made.add_row(*row, style="bold" if stands_out else None)
    return made
