"""The distributions of this repository, found on disk so that nothing has to list them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CORE = "polyshard"
ENTRY_POINT_GROUP = "polyshard.plugins"


@dataclass(frozen=True)
class Distribution:
    """One folder with a ``pyproject.toml``, and its ``[project]`` table."""

    folder: Path
    project: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name on the package index."""
        return str(self.project["name"])

    @property
    def import_name(self) -> str:
        """The name after ``import``."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """The folder of the import package."""
        return self.folder / "src" / self.import_name

    @property
    def version(self) -> str | None:
        """The version in ``__about__.py``; None where the file or the line is missing."""
        about = self.source / "__about__.py"
        text = about.read_text("utf-8") if about.is_file() else ""
        match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
        return match[1] if match else None

    @property
    def entry_points(self) -> dict[str, dict[str, str]]:
        """What ``entry_points.txt`` of a built wheel has to say, by group."""
        scripts = self.project.get("scripts", {})
        groups = {name: dict(group) for name, group in self.project.get("entry-points", {}).items()}
        return {**({"console_scripts": dict(scripts)} if scripts else {}), **groups}


def public_modules(root: Path) -> list[str]:
    """Every module that users and authors of plugins may import: the table of the reference."""
    page = (root / "docs" / "reference" / "api.md").read_text("utf-8")
    return re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)


def distributions(root: Path) -> list[Distribution]:
    """All distributions below ``packages/`` and ``plugins/``, in a stable order."""
    files = [*sorted(root.glob("packages/*/pyproject.toml"))]
    files += sorted(root.glob("plugins/*/pyproject.toml"))
    tables = [(file.parent, tomllib.loads(file.read_text("utf-8"))) for file in files]
    return [Distribution(folder, table["project"]) for folder, table in tables]
