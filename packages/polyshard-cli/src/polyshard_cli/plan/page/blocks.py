"""What a section is made of: text, lists, tables and drawings, without a word of HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from polyshard_cli.plan.page.canvas import Canvas

__all__ = ["Block", "Drawing", "Items", "Section", "Table", "Text"]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str
    kind: ClassVar[Literal["text"]] = "text"


@dataclass(frozen=True)
class Items:
    """A list; an item may have a name before its words, or an empty one."""

    items: tuple[tuple[str, str], ...]
    kind: ClassVar[Literal["items"]] = "items"


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
    kind: ClassVar[Literal["table"]] = "table"

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.caption


@dataclass(frozen=True)
class Drawing:
    """A picture that is drawn once for a wide screen, and once for a phone."""

    name: str
    """A word, of which a page has only one."""
    title: str
    """What it shows: read aloud where it cannot be seen."""
    draw: Callable[[Canvas], None]
    rows: float
    """Its height: how many bars are above one another."""
    kind: ClassVar[Literal["drawing"]] = "drawing"


Block = Text | Items | Table | Drawing


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading of its own."""

    name: str
    """A word, of which a page has only one: it is linked by it."""
    title: str
    blocks: tuple[Block, ...]
