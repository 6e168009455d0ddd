"""Write docs/reference/versions.md from what tools/try_version.py found.

Usage: python tools/make_version_docs.py [--check]  (--check: only say whether it is current)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated import write_or_check
from torch_features import FEATURES
from trial_environment import Outcome
from try_version import plugin_names

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "versions.md"
RESULTS = ROOT / "docs" / "reference" / "versions.json"
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
PYTHONS = ("3.11", "3.12", "3.13")
HEAD = """# Versions

Generated from [`versions.json`](versions.json) by `tools/make_version_docs.py`. Each column of the
first table is one trial by `tools/try_version.py`, which `nox -s "versions(torch='...',
interpreter='...')"` calls: the built wheels in an environment that holds nothing else, which is
deleted after. `nox -s matrix` makes all of them,
one after the other; they need 5 GB each where torch is a CUDA build, and no GPU. **Only what stands
here was run so**; what was tested in other ways is in [the support table](support.md).

polyshard asks for torch 2.11 or newer and has no upper bound. `fully_shard` on a torch newer than
the newest column of the second table warns once in a process (`UntestedVersionWarning`), naming the
range.
"""
NOT_RUN = "Not run so yet: {}.\n"

Record = dict[str, Any]


def minor(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.split(".")[:2])


def cell(said: dict[str, str] | str | None) -> str:
    """How many of something were fine, and which were not."""
    if said is None:
        return "not run"
    if isinstance(said, str):
        return _marked(said)
    bad = [name for name, text in said.items() if text.startswith(Outcome.FAILED)]
    passed = [re.search(r"(\d+) passed", text) for text in said.values()]
    tests = sum(int(match[1]) for match in passed if match)
    text = f"{'✘' if bad else '✔'} {len(said) - len(bad)} of {len(said)}"
    text += f", {tests:,} tests" if tests else ""
    return text + (f"; not {', '.join(bad)}" if bad else "")


def _marked(text: str) -> str:
    is_bad = text.startswith(Outcome.FAILED)
    short = text.removeprefix(f"{Outcome.FAILED}: ").replace("|", "\\|")
    return f"{'✘' if is_bad else '✔'} {short}"


def run_rows(records: list[Record]) -> Iterator[str]:
    """One column a run."""
    yield "| | " + " | ".join(f"torch {one['torch']}" for one in records) + " |"
    yield "|---" * (len(records) + 1) + "|"
    rows = {
        "Python": [one["python"] for one in records],
        "date": [f"{one['date']}, `{one['commit']}`" for one in records],
        f"subsets installed and used for a step (of {2 ** len(plugin_names())})": [
            cell(_of(r, "smoke")) for r in records
        ],
        "conformance tests: no plugin, each alone, all": [
            cell(_of(r, "conformance")) for r in records
        ],
        "core's whole suite": [cell(_of(r, "core")) for r in records],
    }
    for check in dict.fromkeys(name for one in records for name in one.get("checks", {})):
        rows[f"`{check}`" if "user" not in check else check] = [
            cell(one.get("checks", {}).get(check)) for one in records
        ]
    if any("stopped" in one for one in records):
        rows["run to its end"] = [cell(one.get("stopped", "all was run")) for one in records]
    for name, cells in rows.items():
        yield f"| {name} | " + " | ".join(cells) + " |"


def _of(record: Record, key: str) -> dict[str, str] | str | None:
    found: dict[str, str] | str | None = record.get(key, record.get("install"))
    return found


def feature_rows(records: list[Record]) -> Iterator[str]:
    """One column a version; in brackets what was not asked of that version itself."""
    asked: dict[str, dict[str, bool]] = {
        minor(one["torch"]): one["features"]
        for one in records
        if isinstance(one.get("features"), dict)
    }
    yield "| | " + " | ".join(f"torch {torch}" for torch in TORCHES) + " | elsewhere polyshard |"
    yield "|---" * (len(TORCHES) + 2) + "|"
    for feature in FEATURES:
        cells = []
        for torch in TORCHES:
            has = tuple(int(part) for part in torch.split(".")) >= feature.since
            found = asked.get(torch, {}).get(feature.name)
            sign = "✔" if (has if found is None else found) else "–"
            cells.append(f"({sign})" if found is None else sign)
        yield f"| {feature.name} | " + " | ".join(cells) + f" | {feature.without} |"


def page(records: list[Record]) -> str:
    """The whole page."""
    run = {(minor(one["torch"]), minor(one["python"])) for one in records}
    missing = [
        f"torch {torch} with Python {', '.join(left)}"
        for torch in TORCHES
        if (left := [python for python in PYTHONS if (torch, python) not in run])
    ]
    lines = [HEAD, "## What was run\n", *run_rows(records), ""]
    lines += [NOT_RUN.format("; ".join(missing))] if missing else []
    lines += [
        "## What each torch has\n",
        "Asked of the version itself (`tools/torch_features.py`); in brackets, where it was not\n"
        "run, what polyshard's own checks of versions take it to have.\n",
        *feature_rows(records),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write or check."""
    records = json.loads(RESULTS.read_text("utf-8"))
    write_or_check({PAGE: page(records)}, "make_version_docs.py")


if __name__ == "__main__":
    main()
