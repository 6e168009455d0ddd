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
    FaultCell,
    Way,
)
from generated import table, write_or_check

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


HEALTHY = (
    (
        "the store does not answer for a moment, again and again (less than 10 s each time)",
        "nothing: a pause ends when the store answers again",
        "packages/polyshard/tests/alarm/test_watch.py::test_pauses_of_the_store_do_not_add_up",
    ),
    (
        "failures and mended groups, many of them in one job",
        "the store keeps those of the last 16; each mended gloo group keeps two idle threads",
        "packages/polyshard/tests/rollback/test_waiting.py::test_failures_do_not_fill_the_store",
    ),
    (
        "a `save_async` that failed, was waited for and handled",
        "its error is raised once; the next `save()` writes",
        "packages/polyshard-checkpoint/tests/checkpoint/test_async.py::"
        "test_a_failed_save_that_was_handled_is_over",
    ),
    (
        "a model dropped with a gather in flight, before its peers begin to gather it",
        "nothing: the next model trains",
        "packages/polyshard/tests/transport/test_transport.py::"
        "test_a_model_dropped_while_it_gathers_disturbs_no_other",
    ),
)
"""What stops no rank, what ranks make of it, and the test."""


def page() -> str:
    """The whole page."""
    found = json.loads(FIGURES.read_text("utf-8"))
    about, seconds = found["about"], found["found"]["seconds"]
    parts = [HEAD, _seen(), _healthy(), _ways(), _times(seconds)]
    parts.append(
        f"Measured on {about['machine']}, {about['date']}, torch {about['versions']['torch']}"
    )
    parts.append(", while other programs ran. A rank whose process ends has no figure.\n")
    return "".join(parts)


def _seen() -> str:
    rows = [
        [
            fault.what,
            f"`{fault.struck}`" if fault.struck else "its process ends or stands still",
            f"`{fault.peers}`",
            " … ".join(f"`{words}`" for words in fault.words),
        ]
        for fault in FAULTS
    ]
    headings = ["fault", "the rank itself", "all others", "which says"]
    return f"## What each rank sees\n\n{table(headings, rows)}\n"


def _healthy() -> str:
    rows = [[what, comes, f"`{test}`"] for what, comes, test in HEALTHY]
    headings = ["what", "what comes of it", "test"]
    return f"## What stops no rank\n\n{table(headings, rows)}\n"


def _ways() -> str:
    rows = [
        [
            ", ".join(f"*{fault.id}*" for fault in FAULTS if fault.way is way),
            "nothing" if way is Way.NEW_PLAN else "the step",
            way.value,
        ]
        for way in Way
    ]
    headings = ["faults", "lost", "how to go on"]
    return f"## What is lost, and how to go on\n\n{table(headings, rows)}\n"


def _times(seconds: dict[str, list[float | None]]) -> str:
    rows = [
        [
            f"*{fault.id}*: {fault.what}",
            *(_figure(FaultCell(fault, *column), seconds) for column in COLUMNS),
        ]
        for fault in FAULTS
    ]
    return (
        "## Seconds to the error\n\nOf the slowest rank, the one that fails included.\n\n"
        f"{table(['fault', *(_title(stack, layout) for stack, layout in COLUMNS)], rows)}\n"
    )


def _figure(cell: FaultCell, seconds: dict[str, list[float | None]]) -> str:
    if cell not in FAULT_CELLS or cell.id not in seconds:
        return "" if cell in FAULT_CELLS else "–"
    return f"{max(each for each in seconds[cell.id] if each is not None):.2f}"


def _title(stack: Stack, layout: Layout) -> str:
    return f"{', '.join(stack) or 'none'} ({layout.name}, {layout.ranks} ranks)"


def files() -> dict[Path, str]:
    """The page."""
    return {PAGE: page()}


if __name__ == "__main__":
    write_or_check(files(), "make_fault_docs.py")
