"""The links of a page: found, checked, and turned from paths of the repository to the site's."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from check_docs import FENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TARGET = re.compile(r"(?<=\]\()(?P<target>[^)\s]+)(?=\))")
LINK = re.compile(r"(?<!!)\[(?P<label>[^\[\]]*)\]\((?P<target>[^)\s]+)\)")
HOSTS = frozenset(
    {
        "docs.pypi.org",
        "doi.org",
        "github.com",
        "keepachangelog.com",
        "mkdocstrings.github.io",
        "pypi.org",
        "ui.perfetto.dev",
    }
)
"""Where links may lead. Nothing is fetched: a new host is looked at by whoever adds it here."""


class LinkError(ValueError):
    """A link that leads nowhere, or where nobody looked."""


@dataclass(frozen=True)
class Map:
    """Where the files of the repository ``root`` are on the site."""

    root: Path
    pages: Mapping[Path, PurePosixPath]

    def moved(self, page: Path, text: str) -> str:
        """``text`` of ``page`` with links that hold on the site.

        Raises:
            LinkError: naming the page, the line and the link.
        """
        parts, end = [], 0
        for match in _outside_of_code(TARGET, text):
            try:
                moved = self._moved(page, match["target"])
            except LinkError as error:
                line = text.count("\n", 0, match.start()) + 1
                raise LinkError(f"{page.relative_to(self.root)}:{line}: {error}") from None
            parts += [text[end : match.start()], moved]
            end = match.end()
        return "".join([*parts, text[end:]])

    def linked_files(self) -> set[Path]:
        """Files that pages link and that are no pages: pictures, and sources to look at."""
        return {
            file
            for page in self.pages
            for target in targets(page.read_text("utf-8"))
            if (file := linked_file(page, target)) and file not in self.pages
        }

    def _moved(self, page: Path, target: str) -> str:
        file = linked_file(page, target)
        if file is None:  # another site, or a heading of this page that Sphinx looks for
            return checked_address(target) if urlsplit(target).scheme else target
        if not file.is_file():
            raise LinkError(f"{target} is not there")
        place = self.pages.get(file) or asset(file.relative_to(self.root))
        moved = os.path.relpath(place, self.pages[page].parent)
        fragment = urlsplit(target).fragment
        return f"{moved}#{fragment}" if fragment else moved


def linked_file(page: Path, target: str) -> Path | None:
    """The file that ``page`` links by ``target``; of a folder its README. None for an address."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    file = Path(os.path.normpath(page.parent / parts.path))
    return file / "README.md" if file.is_dir() else file


def asset(file: Path) -> PurePosixPath:
    """Where a file that is no page stands on the site: pictures, and sources to look at."""
    inside = file.parts[1:] if file.parts[0] == "docs" else ("files", *file.parts)
    return PurePosixPath(*inside)


def checked_address(address: str) -> str:
    """An address outside of the repository, if it is one that may be linked.

    Raises:
        LinkError: not https, or a host that is not in ``HOSTS``.
    """
    parts = urlsplit(address)
    if parts.scheme == "mailto":
        return address
    if parts.scheme != "https":
        raise LinkError(f"{address}: write https://")
    if parts.hostname not in HOSTS:
        raise LinkError(f"{address}: see that it is there, then add {parts.hostname} to HOSTS")
    return address


def targets(text: str) -> list[str]:
    """The targets of all links of a page, pictures included, in their order."""
    return [match["target"] for match in _outside_of_code(TARGET, text)]


def links(text: str) -> list[tuple[str, str]]:
    """What each link of a page is called, and its target; without pictures."""
    found = _outside_of_code(LINK, text)
    return [(" ".join(match["label"].split()).replace("`", ""), match["target"]) for match in found]


def _outside_of_code(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Matches but those in fenced blocks and code spans."""
    code = [fence.span() for fence in FENCE.finditer(text)]
    code += [span.span() for span in re.finditer(r"(`+)(?!`)[^\n]*?(?<!`)\1(?!`)", text)]
    for match in pattern.finditer(text):
        if not any(start <= match.start("target") < stop for start, stop in code):
            yield match
