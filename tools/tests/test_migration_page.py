"""The page of terms is what the tables generate, and says every verdict."""

from __future__ import annotations

from make_migration_docs import PAGE, WORDS, page
from polyshard_migrate.terms.catalog import GUIDES
from polyshard_migrate.terms.term import Verdict


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/make_migration_docs.py"


def test_every_word_is_explained() -> None:
    assert set(WORDS) == set(Verdict)


def test_every_term_has_a_row_of_four_cells() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(table.terms) for guide in GUIDES for table in guide.tables)
    assert all(row.count(" | ") == 3 for row in rows), "a cell holds a bar"
