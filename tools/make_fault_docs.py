"""Write docs/reference/faults.md from the table of faults and the measured seconds.

Usage: python tools/make_fault_docs.py [--check]  (--check: only say whether it is current)
"""

from __future__ import annotations

import json
from pathlib import Path

from composition_table import Layout, Stack
from fault_table import (
    BAR_SECONDS,
    COLUMNS,
    FAULT_CELLS,
    FAULTS,
    SAMPLE,
    TIMEOUT_SECONDS,
    Fault,
    FaultCell,
    Way,
)
from generated import write_or_check

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "faults.md"
FIGURES = ROOT / "benchmarks" / "results" / "faults" / "cells.json"
HEAD = f"""# Faults

Generated from `tools/fault_table.py` and `benchmarks/results/faults/cells.json` by
`tools/make_fault_docs.py`; edit the table, and measure with `python -m faults cells` (in
`integration_tests/`).

What goes wrong on one rank, under every subset of the plugins, and what all ranks make of it:
{len(FAULT_CELLS)} cells. Each is a test (`integration_tests/test_faults.py`) on processes of its
own, in a process group whose time-out is {TIMEOUT_SECONDS:.0f} s: that rank
1 (or 0, where it keeps the store) meets what is said here, that every other rank raises the error
named, with these words in this order, within {BAR_SECONDS:.0f} s, and that **nothing is lost but
the step**: weights and optimizer state are those of before it, bit by bit, and so are the losses
and the end of a run that goes on, compared with a run that nothing happens to. Where a process
ends, that holds for new ranks that load the checkpoint of before the step. How failures travel:
[explanation](../explanation/failures.md).

CI runs {", ".join(f"*{name}*" for name in SAMPLE)} without plugins; `pytest
integration_tests/test_faults.py --all-faults` runs every cell. With tensor parallelism, ranks that
share a batch are struck together where control flow differs, either of them is named, and one that
waits in a collective of its backward raises gloo's `RuntimeError` with these words as a note.

"""


def page() -> str:
    """The whole page."""
    found = json.loads(FIGURES.read_text("utf-8"))
    about, seconds = found["about"], found["found"]["seconds"]
    parts = [HEAD, _seen(), _ways(), _times(seconds)]
    parts.append(
        f"Measured on {about['machine']}, {about['date']}, torch {about['versions']['torch']}"
    )
    parts.append(", while other programs ran. A rank whose process ends has no figure.\n")
    return "".join(parts)


def _seen() -> str:
    lines = ["## What each rank sees", ""]
    lines += [_row(["fault", "the rank itself", "all others", "which says"]), _row(["---"] * 4)]
    for fault in FAULTS:
        struck = f"`{fault.struck}`" if fault.struck else "its process ends or stands still"
        words = " … ".join(f"`{words}`" for words in fault.words)
        lines.append(_row([fault.what, struck, f"`{fault.peers}`", words]))
    return "\n".join(lines) + "\n\n"


def _ways() -> str:
    lines = ["## What is lost, and how to go on", ""]
    lines += [_row(["faults", "lost", "how to go on"]), _row(["---"] * 3)]
    for way in Way:
        names = ", ".join(f"*{fault.id}*" for fault in FAULTS if fault.way is way)
        lost = "nothing" if way is Way.NEW_PLAN else "the step"
        lines.append(_row([names, lost, way.value]))
    return "\n".join(lines) + "\n\n"


def _times(seconds: dict[str, list[float | None]]) -> str:
    lines = [
        "## Seconds to the error",
        "",
        "Of the slowest rank, the one that fails included.",
        "",
        _row(["fault", *(_title(stack, layout) for stack, layout in COLUMNS)]),
        _row(["---"] * (len(COLUMNS) + 1)),
    ]
    for fault in FAULTS:
        figures = [_figure(FaultCell(fault, *column), seconds) for column in COLUMNS]
        lines.append(_row([_name(fault), *figures]))
    return "\n".join(lines) + "\n\n"


def _figure(cell: FaultCell, seconds: dict[str, list[float | None]]) -> str:
    if cell.id not in seconds:
        return ""
    return f"{max(each for each in seconds[cell.id] if each is not None):.2f}"


def _name(fault: Fault) -> str:
    return f"*{fault.id}*: {fault.what}"


def _title(stack: Stack, layout: Layout) -> str:
    return f"{', '.join(stack) or 'none'} ({layout.name}, {layout.ranks} ranks)"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the page, or check it."""
    write_or_check({PAGE: page()}, "make_fault_docs.py")


if __name__ == "__main__":
    main()
