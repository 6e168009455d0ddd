"""Write docs/reference/migration.md from the tables that ``polyshard migrate`` works by.

Usage: python tools/make_migration_docs.py [--check]  (--check: only say whether it is current)
"""

from __future__ import annotations

from pathlib import Path

from generated import write_or_check
from polyshard_migrate.terms.catalog import GUIDES
from polyshard_migrate.terms.term import Guide, Table, Term, Verdict

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "migration.md"
HEAD = """# Migration, term by term

Generated from `polyshard_migrate/terms/`, the tables of polyshard-migrate, by
`tools/make_migration_docs.py`; edit those. Tests compare them with the installed torch: a name that
torch has and no table knows fails. How to use the command: [how to migrate a
script](../how-to/migrate.md).

The second column says what `polyshard migrate` does:

| word | what it means |
|---|---|
"""
WORDS = {
    Verdict.MOVED: "the same name, imported from polyshard or of the same object",
    Verdict.REWRITTEN: "written as in the third column, where that is certain; else listed",
    Verdict.DROPPED: "nothing corresponds, and nothing needs to",
    Verdict.TORCH: "stays as it is, and works",
    Verdict.HAND: "listed with its line: what corresponds takes a choice",
    Verdict.REFUSED: "listed with its line: nothing corresponds; the third column is what there is",
}


def page() -> str:
    """The whole page."""
    words = "".join(f"| {verdict.value} | {what} |\n" for verdict, what in WORDS.items())
    return HEAD + words + "".join(map(_guide, GUIDES))


def _guide(guide: Guide) -> str:
    return f"\n## {guide.name}\n\n{guide.about}\n" + "".join(map(_table, guide.tables))


def _table(table: Table) -> str:
    head = (
        f"\n### {table.title}\n\n| term | done | in polyshard | what differs |\n|---|---|---|---|\n"
    )
    return head + "".join(map(_row, table.terms))


def _row(term: Term) -> str:
    return f"| `{term.theirs}` | {term.verdict.value} | {term.ours} | {term.differs} |\n"


def files() -> dict[Path, str]:
    """The page."""
    return {PAGE: page()}


if __name__ == "__main__":
    write_or_check(files(), "make_migration_docs.py")
