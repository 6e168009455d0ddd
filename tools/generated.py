"""Files that a tool makes: written, or with ``--check`` compared with what it would write."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a page."""
    lines = [row(*headings), row(*["---"] * len(headings)), *(row(*cells) for cells in rows)]
    return "\n".join(lines) + "\n"


def is_current(path: Path, text: str) -> bool:
    """Whether ``path`` holds what the tool makes."""
    return path.exists() and path.read_text("utf-8") == text


def write_or_check(files: Mapping[Path, str], tool: str) -> None:
    """What ``python tools/TOOL`` does with the text of each of its ``files``."""
    for path, text in files.items():
        if "--check" not in sys.argv[1:]:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not is_current(path, text):
            sys.exit(f"{path.name} is out of date: run python tools/{tool}")
