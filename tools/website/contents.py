"""The table of contents: made from the links of index pages, so that nothing is listed twice."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from website.links import links

if TYPE_CHECKING:
    from collections.abc import Mapping

SECTION = re.compile(r"^## +(?P<title>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """Pages under one caption, in their order, each with what it is called there."""

    caption: str
    pages: Mapping[PurePosixPath, str]


def contents(
    texts: Mapping[PurePosixPath, str], start: PurePosixPath
) -> dict[PurePosixPath, tuple[Part, ...]]:
    """What hangs under each page: below ``start`` a part a section, below other pages one.

    A page hangs under the first page that links it, seen from ``start`` breadth-first; only pages
    called ``index`` have others under them. ``texts`` are pages by their paths on the site.
    """
    seen = {start}
    found: dict[PurePosixPath, tuple[Part, ...]] = {}
    waiting = [start]
    while waiting:
        page = waiting.pop(0)
        sections = _sections(texts[page]) if page == start else [("", texts[page])]
        parts = []
        for caption, text in sections:
            new: dict[PurePosixPath, str] = {}
            for label, target in links(text):
                path = _resolved(page, target)
                if path in texts and path not in seen:
                    new[path] = label
                    seen.add(path)
            waiting += [path for path in new if path.name == "index.md"]
            if new:
                parts.append(Part(caption, new))
        if parts:
            found[page] = tuple(parts)
    return found


def toctree(page: PurePosixPath, part: Part) -> str:
    """The directive that hangs the pages of ``part`` under ``page``."""
    caption = [f":caption: {part.caption}"] if part.caption else []
    entries = [
        f"{label} <{os.path.relpath(path, page.parent)}>" for path, label in part.pages.items()
    ]
    return "\n".join(["", "```{toctree}", ":hidden:", *caption, "", *entries, "```", ""])


def _sections(text: str) -> list[tuple[str, str]]:
    starts = list(SECTION.finditer(text))
    stops = [match.start() for match in starts] + [len(text)]
    pairs = zip(starts, stops[1:], strict=True)
    return [("", text[: stops[0]])] + [(at["title"], text[at.end() : stop]) for at, stop in pairs]


def _resolved(page: PurePosixPath, target: str) -> PurePosixPath:
    return PurePosixPath(os.path.normpath(page.parent / target.partition("#")[0]))
