"""The tables of docs/reference/versions.md, from what tools/try_version.py found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subsets import PLUGINS, stack_of
from torch_features import FEATURES
from try_version import CUT, FAILED, NOT_RUN, RESULTS, not_fine
from write_pages import page_with, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "versions.md"
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
PYTHONS = ("3.11", "3.12", "3.13")
RUNS = ("torch", "Python", "subsets", "conformance", "suites", "`pip check`, `mypy --strict`")
HAVE = ("", *TORCHES, "polyshard")

Record = dict[str, Any]


def minor(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.split(".")[:2])


def cell(said: dict[str, str] | None) -> str:
    """How many of something were fine, how many were not, and how many were not run."""
    if not said:
        return "not run"
    left = [text for text in said.values() if text.startswith(NOT_RUN)]
    cut = [text for text in said.values() if text.startswith(CUT)]
    bad = [text for text in said.values() if text.startswith(FAILED)]
    fine = len(said) - len(left) - len(cut) - len(bad)
    passed = [re.search(r"(\d+) passed", text) for text in said.values()]
    tests = sum(int(match[1]) for match in passed if match)
    sign = "✘" if bad else "–" if cut or left else "✔"
    text = f"{sign} {fine} of {len(said)}"
    return text + (f", {tests:,} tests" if tests else "")


def run_rows(records: list[Record]) -> Iterator[list[str]]:
    """One line for all Pythons with which trials of one torch found the same."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for one in records:
        cells = [cell(one.get(key)) for key in ("smoke", "conformance", "suites", "checks")]
        if "install" in one:
            cells = ["✘ not installed"] * len(cells)
        alike.setdefault((one["torch"], *cells), []).append(one["python"])
    for (torch, *cells), pythons in alike.items():
        yield [torch, ", ".join(pythons), *cells]


def remarks(records: list[Record]) -> Iterator[str]:
    """What was not fine, and why; parts of one trial with the same reason in one line."""
    every = stack_of(PLUGINS)  # as earlier trials call it
    for one in records:
        parts: dict[tuple[str, str], list[str]] = {}
        for heading, name, said in not_fine(one):
            parts.setdefault((heading, said), []).append("all" if name == every else name)
        trial = f"torch {one['torch']}, Python {one['python']}"
        for (heading, said), names in parts.items():
            what = f"{heading} ({', '.join(names)})" if any(names) else heading
            yield f"- {trial}, {what}: {said.replace('|', '&#124;')}"
        if "note" in one:  # written by hand; the next trial of the two replaces it
            yield f"- {trial}: {one['note']}"


def feature_rows(records: list[Record]) -> Iterator[list[str]]:
    """One column a version; in brackets what was not asked of that version itself."""
    asked: dict[str, dict[str, bool]] = {
        minor(one["torch"]): one["features"]
        for one in records
        if isinstance(one.get("features"), dict)
    }
    for feature in FEATURES:
        cells = []
        for torch in TORCHES:
            has = tuple(int(part) for part in torch.split(".")) >= feature.since
            found = asked.get(torch, {}).get(feature.name)
            sign = "✔" if (has if found is None else found) else "–"
            cells.append(f"({sign})" if found is None else sign)
        yield [feature.name, *cells, feature.without]


def what_was_run(records: list[Record]) -> str:
    """What each trial found, and which trials there were not."""
    run = {(minor(one["torch"]), minor(one["python"])) for one in records}
    missing = [
        f"torch {torch} with Python {', '.join(left)}"
        for torch in TORCHES
        if (left := [python for python in PYTHONS if (torch, python) not in run])
    ]
    lines = [table(RUNS, run_rows(records))]
    if noted := list(remarks(records)):
        lines += ["Failed or not run:\n", *noted, ""]
    return "\n".join(lines + [f"Not run: {'; '.join(missing)}."] * bool(missing))


def files() -> dict[Path, str]:
    """The page, of what was found."""
    records = json.loads(RESULTS.read_text("utf-8"))
    features = table(HAVE, feature_rows(records))
    return page_with(PAGE, run=what_was_run(records), features=features)
