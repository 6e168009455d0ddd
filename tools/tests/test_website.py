"""What pages say of tests, modules and packages is true; nothing is built here."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from build_site import list_versions
from named_tests import is_there, named_in
from workspace import distributions, public_modules

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "p*/*/README.md", "examples/*/README.md")
PAGES = [page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))]


def test_the_table_of_public_names_has_every_package() -> None:
    fronts = {dist.import_name for dist in distributions(ROOT)}
    named = {front for front in fronts if getattr(importlib.import_module(front), "__all__", ())}
    rooms = {name for name in public_modules(ROOT) if "." in name}
    assert set(public_modules(ROOT)) == named | rooms
    assert all(importlib.import_module(room) for room in rooms)


def test_versions_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("0.2", "0.10", "source"):
        (tmp_path / name).mkdir()
    assert list_versions(tmp_path) == ["0.10", "0.2"]
    assert 'url=0.10/docs/index.html"' in (tmp_path / "index.html").read_text("utf-8")


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_tests_that_a_page_names_exist(file: Path) -> None:
    named = named_in(file.read_text("utf-8"))
    assert [name for name in named if not is_there(name)] == []


def test_readmes_say_alike_how_to_install() -> None:
    direct = {
        dist.name: {re.split(r"[\[<>=]", text)[0] for text in dist.project["dependencies"]}
        for dist in distributions(ROOT)
    }
    for dist in distributions(ROOT):
        folder = dist.folder.relative_to(ROOT)
        needed = direct[dist.name]
        for name in tuple(needed):
            needed = needed | direct.get(name, set())
        others = [d for d in distributions(ROOT) if d.name in needed and d.name != dist.name]
        before = "".join(f"./{other.folder.relative_to(ROOT)} " for other in others)
        text = (dist.folder / "README.md").read_text("utf-8")
        line = next(line for line in text.splitlines() if line.startswith("pip install "))
        assert line.split()[:3] == ["pip", "install", dist.name]
        assert line.endswith(f"# or, in a checkout: pip install {before}./{folder}")
