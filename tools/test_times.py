"""Print where the time of the tests goes, from the JUnit files of the last `nox -s tests`.

Usage: python tools/test_times.py [FOLDER]      (default: build/junit)

Three tables in Markdown: runs of pytest, rooms (a folder of tests), and the slowest tests. Seconds
are those of tests as workers measured them, beside each other; those of a run are of the clock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

SLOWEST = 15
ROOMS = 20


@dataclass(frozen=True)
class Case:
    """One test of one run; ``seconds`` include its fixtures."""

    run: str
    room: str
    name: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """One run of pytest."""

    name: str
    wall_seconds: float
    cases: tuple[Case, ...]


def read(file: Path) -> Run:
    """Read one JUnit file of pytest."""
    suite = next(ElementTree.parse(file).getroot().iter("testsuite"))
    cases = tuple(
        _case(file.stem, case.get("classname", ""), case.get("name", ""), case.get("time", "0"))
        for case in suite.iter("testcase")
    )
    return Run(file.stem, float(suite.get("time", "0")), cases)


def _case(run: str, module: str, name: str, seconds: str) -> Case:
    """``packages.polyshard.tests.engine.test_units`` is in the room ``polyshard/engine``."""
    parts = module.split(".")
    distribution = parts[1] if parts[0] in ("packages", "plugins") else parts[0]
    inner = parts[parts.index("tests") + 1 : -1] if "tests" in parts else []
    return Case(run, "/".join([distribution, *inner]), f"{parts[-1]}::{name}", float(seconds))


def table(headings: Iterable[str], rows: Iterable[tuple[object, ...]]) -> str:
    """One table in Markdown."""
    lines = [tuple(headings)]
    lines.append(tuple("---" for _ in lines[0]))
    lines += [tuple(map(str, row)) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def seconds(cases: Iterable[Case]) -> str:
    """Of all of ``cases``, rounded."""
    return f"{sum(case.seconds for case in cases):.0f}"


def report(runs: list[Run]) -> str:
    """The three tables."""
    cases = [case for run in runs for case in run.cases]
    runs = sorted(runs, key=lambda run: -run.wall_seconds)
    by_run = [(r.name, len(r.cases), seconds(r.cases), f"{r.wall_seconds:.0f}") for r in runs]
    of_room: dict[str, list[Case]] = {}
    for case in cases:
        of_room.setdefault(case.room, []).append(case)
    rooms = [(room, len(held), seconds(held)) for room, held in of_room.items()]
    rooms = sorted(rooms, key=lambda row: -int(row[2]))[:ROOMS]
    slowest = sorted(cases, key=lambda case: -case.seconds)[:SLOWEST]
    return "\n\n".join(
        [
            table(("run", "tests", "seconds of tests", "seconds"), by_run),
            table(("room", "tests", "seconds of tests"), rooms),
            table(
                ("slowest", "room", "run", "seconds"),
                [(f"`{c.name}`", c.room, c.run, f"{c.seconds:.1f}") for c in slowest],
            ),
        ]
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/junit")
    print(report([read(file) for file in sorted(folder.glob("*.xml"))]))
