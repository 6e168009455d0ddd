"""Migrating text in tests, and the findings about it."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from pathlib import Path

from polyshard_cli.migrate import Finding, Kind
from polyshard_cli.migrate.families.deepspeed import Beside
from polyshard_cli.migrate.migration import migrate_source


@dataclass(frozen=True)
class Migrated:
    text: str
    findings: tuple[Finding, ...]

    def of(self, *kinds: Kind) -> list[tuple[int, str]]:
        """Line and term of each finding of these kinds."""
        return [(each.line, each.term) for each in self.findings if each.kind in kinds]

    @property
    def left(self) -> list[tuple[int, str]]:
        return self.of(Kind.HAND, Kind.REFUSED)

    def messages(self) -> str:
        return "\n".join(f"{each.message} {each.instead}" for each in self.findings)


def migrated(source: str, folder: Path = Path(), configuration: Path | None = None) -> Migrated:
    """``source``, dedented, migrated; that again changes nothing, which is checked."""
    text = textwrap.dedent(source).lstrip("\n")
    beside = Beside(folder, configuration)
    file = migrate_source(Path("script.py"), text.encode(), beside)
    ast.parse(file.after)
    again = migrate_source(Path("script.py"), file.after, beside)
    assert again.after == file.after, "migrating what was migrated changed it"
    return Migrated(file.after.decode(), file.findings)


def unchanged(source: str, folder: Path = Path()) -> Migrated:
    """The same, where nothing may change."""
    found = migrated(source, folder)
    assert found.text == textwrap.dedent(source).lstrip("\n")
    return found
