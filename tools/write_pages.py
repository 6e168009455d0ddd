"""Write the parts of pages, and the pictures, of docs/ that code and figures make.

Usage: python tools/write_pages.py [MAKER ...]      (default: make_house, make_hook_docs, ...: all)

What is between ``<!-- NAME -->`` and ``<!-- end -->`` in a page is made, the rest written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
from benchmarks.result import filled  # noqa: E402

MAKERS = [path.stem for path in sorted(Path(__file__).parent.glob("make_*.py"))]
"""Modules with a function ``files()``."""


def files_of(maker: str) -> Mapping[Path, str]:
    """What the module ``maker`` makes: paths and texts."""
    found: Mapping[Path, str] = import_module(maker).files()
    return found


def page_with(page: Path, **parts: str) -> dict[Path, str]:
    """``page`` with these parts, by their names in it."""
    text = page.read_text("utf-8")
    if absent := [name for name in parts if f"\n<!-- {name} -->\n" not in text]:
        raise LookupError(f"{page.name} has no line <!-- {absent[0]} -->")
    return {page: filled(text, {name: [part.rstrip()] for name, part in parts.items()})}


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a page."""
    lines = (headings, ["---"] * len(headings), *rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    for maker in sys.argv[1:] or MAKERS:
        for path, text in files_of(maker).items():
            path.write_text(text, encoding="utf-8")
