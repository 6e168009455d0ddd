"""The gallery's pages are the files' code, and its modules stay short."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import make_gallery_docs
from make_gallery_docs import MAX_LINES, MODULES, PAGES, ROOT, modules, page, problems


def test_the_pages_are_current() -> None:
    assert problems() == []


@pytest.mark.parametrize("name", modules())
def test_a_page_shows_the_whole_module(name: str) -> None:
    assert modules()[name].read_text("utf-8") in page(name)


def test_a_stale_page_and_a_long_module_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_gallery_docs, "PAGES", tmp_path)
    (tmp_path / "index.md").write_text((PAGES / "index.md").read_text("utf-8"), encoding="utf-8")
    monkeypatch.setattr(make_gallery_docs, "MAX_LINES", 50)
    found = problems()
    assert "topk.md is out of date: run python tools/make_gallery_docs.py" in found
    assert any("low_rank.py" in line and "fewer than 50" in line for line in found)


def test_every_module_is_an_entry_point_and_has_tests() -> None:
    folder = ROOT / "examples" / "plugins"
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    named = {
        value.partition(":")[0] for value in project["entry-points"]["polyshard.plugins"].values()
    }
    assert named == {f"{MODULES.name}.{name}" for name in modules()}
    for name in modules():
        assert (folder / "tests" / f"test_{name}.py").is_file()
    assert MAX_LINES == 80


def test_only_public_names_are_imported() -> None:
    public = {"polyshard", "polyshard.seams", "polyshard.transport", "polyshard.testing"}
    for path in modules().values():
        for line in path.read_text("utf-8").splitlines():
            words = line.split()
            if words[:1] in (["from"], ["import"]) and words[1].startswith("polyshard"):
                assert words[1] in public, f"{path.name}: {line}"
