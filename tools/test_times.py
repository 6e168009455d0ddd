"""Print where the time of the tests goes, from the JUnit files of the last `nox -s tests`.

Usage: python tools/test_times.py [FOLDER]      (default: build/junit)

Three tables in Markdown: runs of pytest, rooms (a folder of tests), and the slowest tests. Seconds
are those of tests as workers measured them, beside each other; those of a run are of the clock.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

from write_pages import table

SLOWEST = 15
ROOMS = 20
Case = tuple[str, str, str, float]
"""Its run, room and name, and seconds with its fixtures."""


def read(file: Path) -> tuple[float, list[Case]]:
    """Seconds of the clock, and the tests, of one JUnit file of pytest."""
    suite = next(ElementTree.parse(file).getroot().iter("testsuite"))
    cases = []
    for case in suite.iter("testcase"):
        # packages.polyshard.tests.engine.test_units is in the room polyshard/engine
        parts = case.get("classname", "").split(".")
        distribution = parts[1] if parts[0] in ("packages", "plugins") else parts[0]
        inner = parts[parts.index("tests") + 1 : -1] if "tests" in parts else []
        name = f"`{parts[-1]}::{case.get('name')}`"
        room = "/".join([distribution, *inner])
        cases.append((file.stem, room, name, float(case.get("time", "0"))))
    return float(suite.get("time", "0")), cases


def report(files: list[Path]) -> str:
    """The three tables."""
    found = [read(file) for file in files]
    cases = sorted((case for _, held in found for case in held), key=lambda case: -case[3])
    runs = [
        (held[0][0], str(len(held)), f"{sum(case[3] for case in held):.0f}", f"{wall:.0f}")
        for wall, held in sorted(found, key=lambda run: -run[0])
        if held
    ]
    seconds: dict[str, list[float]] = {}
    for case in cases:
        seconds.setdefault(case[1], []).append(case[3])
    rooms = sorted(seconds.items(), key=lambda room: -sum(room[1]))[:ROOMS]
    tables = (
        table(("run", "tests", "seconds of tests", "seconds"), runs),
        table(
            ("room", "tests", "seconds of tests"),
            [(room, str(len(each)), f"{sum(each):.0f}") for room, each in rooms],
        ),
        table(
            ("slowest", "room", "run", "seconds"),
            [(name, room, run, f"{spent:.1f}") for run, room, name, spent in cases[:SLOWEST]],
        ),
    )
    return "\n".join(tables)


if __name__ == "__main__":
    print(report(sorted(Path(*sys.argv[1:2] or ["build/junit"]).glob("*.xml"))))
