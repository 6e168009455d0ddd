"""Which files of the repository are pages of the site, and where each stands there."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

START = "index.md"
"""The page that leads to all others."""


def pages(root: Path) -> dict[Path, PurePosixPath]:
    """Each page's file below ``root``, and its path within the site.

    What is in ``docs/`` stands at the top; the pages beside it (README files, the changelog) are
    called after the folder or the file they are.
    """
    found = {
        file: PurePosixPath(file.relative_to(root / "docs")) for file in _in(root, "docs/**/*.md")
    }
    found |= {file: PurePosixPath(file.name.lower()) for file in _in(root, "*.md")}
    for kind in ("packages", "plugins", "examples"):
        for file in _in(root, f"{kind}/*/README.md"):
            found[file] = PurePosixPath(kind, f"{file.parent.name}.md")
    return found


def _in(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))
