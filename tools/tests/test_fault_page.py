"""Every fault has a figure, and the page is what the table and the figures generate."""

from __future__ import annotations

from benchmarks.result import read
from composition_table import STACKS
from fault_table import BAR_SECONDS, FAULT_CELLS, FAULTS, SAMPLE, TIMEOUT_SECONDS
from make_fault_docs import FIGURES, PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/make_fault_docs.py"


def test_every_cell_has_figures() -> None:
    seconds = read(FIGURES).found["seconds"]
    cells = {cell.id: cell for cell in FAULT_CELLS}
    assert set(seconds) == set(cells)
    for name, found in seconds.items():
        cell = cells[name]
        assert len(found) == cell.layout.ranks
        gone = () if cell.fault.struck else cell.struck
        assert [rank for rank, each in enumerate(found) if each is None] == list(gone)
        assert all(each < BAR_SECONDS for each in found if each is not None)


def test_the_table_is_whole() -> None:
    assert {cell.stack for cell in FAULT_CELLS} == set(STACKS)
    assert len({cell.id for cell in FAULT_CELLS}) == len(FAULT_CELLS)
    assert set(SAMPLE) <= {fault.id for fault in FAULTS}
    assert BAR_SECONDS * 5 <= TIMEOUT_SECONDS
