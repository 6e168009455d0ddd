"""Write docs/reference/versions.md from what tools/try_version.py found.

Usage: python tools/make_version_docs.py [--check]  (--check: only say whether it is current)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated import table, write_or_check
from subsets import COMPOSED, PLUGINS, stack_of
from torch_features import FEATURES
from try_version import CUT, FAILED, NOT_RUN, RESULTS, not_fine

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "versions.md"
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
PYTHONS = ("3.11", "3.12", "3.13")
HEAD = """# Versions

Generated from [`versions.json`](versions.json) by `tools/make_version_docs.py`. Each line of the
first table is one trial by `tools/try_version.py`, which `nox -s "versions-3.12(torch='2.13.0')"`
calls: the built wheels in an environment of nox that is deleted after. `nox -s versions` makes all
of them, one after the other; they need 5 GB each where torch is a CUDA build, and no GPU. **Only
what stands here was run so**; what was tested in other ways is in [the support table](support.md).

polyshard asks for torch 2.11 or newer and has no upper bound. `fully_shard` on a torch newer than
the newest column of the second table warns once in a process (`UntestedVersionWarning`), naming the
range.
"""
LEGEND = f"""Subsets of the plugins are installed and used for a step: every one of those that are
combined ({", ".join(stack_of((name,)) for name in COMPOSED)}), each other plugin alone, and all.
Conformance is the tests of each plugin's conformance with all installed, and of core's kit with
none; earlier trials ran it with each alone, too. Suites (`-- --core --plugins`) are all tests of
core, and of a plugin with no other installed.
"""
RUNS = (
    *("torch", "Python", "date"),
    *("subsets", "conformance", "suites", "`pip check`, `mypy --strict`"),
)
HAVE = ("", *(f"torch {torch}" for torch in TORCHES), "elsewhere polyshard")
MISSING = "Not run so yet: {}.\n"

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
    """One line a trial."""
    for one in records:
        cells = [cell(one.get(key)) for key in ("smoke", "conformance", "suites", "checks")]
        if "install" in one:
            cells = ["✘ not installed"] * len(cells)
        about = [one["torch"], one["python"], f"{one['date']}, `{one['commit']}`"]
        yield [*about, *cells]


def remarks(records: list[Record]) -> Iterator[str]:
    """What was not fine, and why; parts of one trial with the same reason in one line."""
    every = stack_of(tuple(PLUGINS))  # as earlier trials call it
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


def page(records: list[Record]) -> str:
    """The whole page."""
    run = {(minor(one["torch"]), minor(one["python"])) for one in records}
    missing = [
        f"torch {torch} with Python {', '.join(left)}"
        for torch in TORCHES
        if (left := [python for python in PYTHONS if (torch, python) not in run])
    ]
    lines = [HEAD, "## What was run\n", LEGEND, table(RUNS, run_rows(records))]
    if noted := list(remarks(records)):
        lines += ["Not fine, or not run:\n", *noted, ""]
    lines += [MISSING.format("; ".join(missing))] if missing else []
    lines += [
        "## What each torch has\n",
        "Asked of the version itself (`tools/torch_features.py`); in brackets, where it was not\n"
        "run, what polyshard's own checks of versions take it to have.\n",
        table(HAVE, feature_rows(records)),
    ]
    return "\n".join(lines)


def files() -> dict[Path, str]:
    """The page, of what was found."""
    return {PAGE: page(json.loads(RESULTS.read_text("utf-8")))}


if __name__ == "__main__":
    write_or_check(files(), "make_version_docs.py")
