"""Write the pages of docs/gallery/ from the plugins of examples/plugins and what its docs/ says.

Usage: python tools/make_gallery_docs.py [--check]      (--check: only say whether it is current)

A page is what ``examples/plugins/docs/NAME.md`` says of a plugin, with the code of its module where
``{code}`` stands: what readers see is what is tested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated import is_current

ROOT = Path(__file__).parents[1]
MODULES = ROOT / "examples" / "plugins" / "src" / "polyshard_gallery"
PAGES = ROOT / "docs" / "gallery"
WORDS = ROOT / "examples" / "plugins" / "docs"
CODE = "{code}"
MAX_LINES = 100
"""A module of the gallery is shorter than this."""


def modules() -> dict[str, Path]:
    """The gallery's modules by name."""
    found = sorted(MODULES.glob("*.py"))
    return {path.stem: path for path in found if path.stem != "__init__"}


def page(name: str) -> str:
    """The page of one module."""
    source = MODULES / f"{name}.py"
    code = source.read_text("utf-8")
    where = source.relative_to(ROOT).as_posix()
    shown = (
        f"<!-- not run: it is the module itself, which the gallery's tests run -->\n"
        f"```python\n{code}```\n\n"
        f"From [`{source.name}`](../../{where}); its tests are "
        f"[`test_{name}.py`](../../examples/plugins/tests/test_{name}.py)."
    )
    words = (WORDS / f"{name}.md").read_text("utf-8")
    head, mark, tail = words.partition(CODE)
    if not mark:
        where = f"{WORDS.relative_to(ROOT).as_posix()}/{name}.md"
        raise ValueError(f"{where} has no {CODE}: say where the code is to stand")
    return f"{head}{shown}{tail}"


def problems() -> list[str]:
    """What keeps the pages from being true, one line each."""
    found = []
    for name, source in modules().items():
        lines = len(source.read_text("utf-8").splitlines())
        if lines >= MAX_LINES:
            found.append(f"{source.name}: {lines} lines; the gallery's have fewer than {MAX_LINES}")
        if f"({name}.md)" not in (PAGES / "index.md").read_text("utf-8"):
            found.append(f"index.md: does not link {name}.md")
        written = PAGES / f"{name}.md"
        if not is_current(written, page(name)):
            found.append(f"{written.name} is out of date: run python tools/make_gallery_docs.py")
    return found


def main() -> None:
    """Write the pages, or check them."""
    if "--check" not in sys.argv[1:]:
        for name in modules():
            (PAGES / f"{name}.md").write_text(page(name), encoding="utf-8")
    if found := problems():
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
