"""The site as it was built: every public name is there, and nothing is fetched."""

from __future__ import annotations

import importlib
import re
import zlib
from pathlib import Path

import pytest

from build_site import version
from workspace import public_modules

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site" / "html" / version(ROOT)
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="no site is built: run nox -s site")
LOADED = re.compile(r"<(?:script|img|iframe)[^>]* src=\"([^\"]+)\"|<link[^>]* href=\"([^\"]+)\"")


def inventory() -> set[str]:
    """Names of Python objects that have an entry: the format is Sphinx's, version 2."""
    *_, body = (SITE / "objects.inv").read_bytes().split(b"\n", 4)
    lines = zlib.decompress(body).decode("utf-8").splitlines()
    return {line.split()[0] for line in lines if line.split()[1].startswith("py:")}


def test_every_public_name_has_an_entry() -> None:
    names = {
        f"{module}.{name}"
        for module in public_modules(ROOT)
        for name in getattr(importlib.import_module(module), "__all__", ())
        if not name.startswith("__")
    }
    names |= {"polyshard.errors.PolyshardError", "polyshard.plugins.builtin.DeviceStorage"}
    assert len(names) > 150
    assert sorted(names - inventory()) == []


def test_every_page_of_the_repository_is_there() -> None:
    """Sphinx fails where no table of contents has a page, or a link leads nowhere."""
    patterns = ("*.md", "docs/**/*.md", "p*/*/README.md", "examples/*/README.md")
    pages = [page for pattern in patterns for page in ROOT.glob(pattern)]
    built = [SITE / page.relative_to(ROOT).with_suffix(".html") for page in pages]
    assert len(built) > 60
    assert [page for page in built if not page.is_file()] == []


def test_nothing_is_loaded_from_elsewhere() -> None:
    pages = "\n".join(path.read_text("utf-8") for path in SITE.rglob("*.html"))
    loaded = {one or other for one, other in LOADED.findall(pages)}
    assert [one for one in sorted(loaded) if re.match(r"(?:https?:)?//", one)] == []
    styles = "\n".join(path.read_text("utf-8") for path in SITE.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*['\"]?((?:https?:)?//[^'\")\s]+)", styles) == []


def test_code_of_blocks_that_run_is_highlighted() -> None:
    text = (SITE / "README.html").read_text("utf-8")
    assert 'class="highlight-python' in text
    assert "highlight-default" not in text


def test_the_version_is_shown() -> None:
    text = (SITE / "docs" / "index.html").read_text("utf-8")
    assert f'data-version="{version(ROOT)}"' in text
    assert version(ROOT) in (SITE.parent / "versions.js").read_text("utf-8")
