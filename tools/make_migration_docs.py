"""The tables of docs/reference/migration.md: those that ``polyshard migrate`` works by."""

from __future__ import annotations

from pathlib import Path

from polyshard_cli.migrate.terms.catalog import GUIDES
from polyshard_cli.migrate.terms.term import Guide, Table, Verdict
from write_pages import page_with, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "migration.md"
WORDS = {
    Verdict.MOVED: "the same name, from polyshard or on the same object",
    Verdict.REWRITTEN: "replaced as in the third column where certain, else listed",
    Verdict.DROPPED: "removed: not needed",
    Verdict.TORCH: "unchanged, and works",
    Verdict.HAND: "listed with its line: you choose",
    Verdict.REFUSED: "listed with its line: no equivalent; the third column is the closest",
}


def _guide(guide: Guide) -> str:
    return f"\n## {guide.name}\n\n{guide.about}\n" + "".join(map(_table, guide.tables))


def _table(found: Table) -> str:
    alike: dict[tuple[str, str], list[str]] = {}
    for term in found.terms:
        said = _short(". ".join(filter(None, (term.ours, term.differs))))
        said = said.replace(f"`polyshard.{term.theirs}`", "the same, of `polyshard`")
        alike.setdefault((term.verdict.value, said), []).append(f"`{term.theirs}`")
    rows = ([", ".join(terms), *key] for key, terms in alike.items())
    return f"\n### {found.title}\n\n" + table(["term", "done", "in polyshard"], rows)


def _short(said: str) -> str:
    """Without what the head of the page says once."""
    said = said.replace(" of `torch.distributed.checkpoint.state_dict`", "")
    return said.replace(" with `StateDictOptions(full_state_dict=True)`", ", *whole*")


def files() -> dict[Path, str]:
    """The page."""
    words = table(["word", "meaning"], ((word.value, what) for word, what in WORDS.items()))
    return page_with(PAGE, words=words, terms="".join(map(_guide, GUIDES)).lstrip())
