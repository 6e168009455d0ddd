"""The site as it was built: every public name is there, every page found, nothing fetched."""

from __future__ import annotations

import importlib
import os
import re
import zlib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typing_extensions import override

from build_site import version
from website.names import public_modules, public_names

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site" / "html" / version(ROOT)
MADE_BY_SPHINX = {"genindex.html", "py-modindex.html", "search.html"}
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="no site is built: run nox -s site")


class _Reader(HTMLParser):
    """Collects where a page leads, and what its browser loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in {"stylesheet", "icon", "preload"}:
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


@cache
def read(page: Path) -> _Reader:
    reader = _Reader()
    reader.feed(page.read_text("utf-8"))
    return reader


def html_pages() -> list[Path]:
    return sorted(path for path in SITE.rglob("*.html") if "_static" not in path.parts)


def leads_to(page: Path, address: str) -> Path | None:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    return Path(os.path.normpath(page.parent / unquote(parts.path)))


def inventory() -> set[str]:
    """Names of Python objects that have an entry: the format is Sphinx's, version 2."""
    *_, body = (SITE / "objects.inv").read_bytes().split(b"\n", 4)
    lines = zlib.decompress(body).decode("utf-8").splitlines()
    return {line.split()[0] for line in lines if line.split()[1].startswith("py:")}


def test_every_public_name_has_an_entry() -> None:
    found = inventory()
    wanted = [
        name.path
        for module in public_modules(ROOT)
        for name in public_names(importlib.import_module(module))
    ]
    assert len(wanted) > 150
    assert [path for path in wanted if path not in found] == []


def test_every_page_is_reached_from_the_first() -> None:
    waiting, seen = [SITE / "index.html"], {SITE / "index.html"}
    while waiting:
        page = waiting.pop()
        for address in read(page).links:
            target = leads_to(page, address)
            if (
                target
                and target.suffix == ".html"
                and SITE in target.parents
                and target not in seen
            ):
                seen.add(target)
                waiting.append(target)
    left = {str(page.relative_to(SITE)) for page in set(html_pages()) - seen}
    assert left <= MADE_BY_SPHINX
    assert len(seen) > 60


def test_links_lead_to_files_that_are_there() -> None:
    broken = [
        f"{page.relative_to(SITE)}: {address}"
        for page in html_pages()
        for address in [*read(page).links, *read(page).loads]
        if (target := leads_to(page, address)) and not target.exists()
    ]
    assert broken == []


def test_nothing_is_loaded_from_elsewhere() -> None:
    loads = {address for page in html_pages() for address in read(page).loads}
    assert [
        a for a in sorted(loads) if urlsplit(a).scheme not in {"", "data"} or a[:2] == "//"
    ] == []
    styles = "\n".join(path.read_text("utf-8") for path in SITE.rglob("*.css"))
    fetched = re.findall(r"(?:@import|url\()\s*['\"]?((?:https?:)?//[^'\")\s]+)", styles)
    assert fetched == []


def test_code_of_blocks_that_run_is_highlighted() -> None:
    text = (SITE / "readme.html").read_text("utf-8")
    assert 'class="highlight-python' in text
    assert "highlight-default" not in text


def test_the_version_is_shown() -> None:
    text = (SITE / "index.html").read_text("utf-8")
    assert f'data-version="{version(ROOT)}"' in text
    assert version(ROOT) in (SITE.parent / "versions.js").read_text("utf-8")
