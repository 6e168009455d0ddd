"""Results on disk: one JSON file a measurement, with what it takes to judge and repeat it."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CPU_MODEL = "model name"


@dataclass(frozen=True)
class About:
    """Where, when and how something was measured. ``quick``: too few steps to mean anything."""

    machine: str
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    quick: bool = False

    @classmethod
    def here(cls, command: str, *, quick: bool = False) -> About:
        versions = {name: metadata.version(name) for name in ("torch", "polyshard")}
        versions["python"] = platform.python_version()
        date = datetime.now(UTC).date().isoformat()
        return cls(_machine(), versions, _commit(), command, date, quick)


@dataclass(frozen=True)
class Result:
    """One measurement: ``kind`` says which fields ``found`` has."""

    name: str
    kind: str
    about: About
    found: dict[str, Any]

    def write(self, folder: Path) -> None:
        """To ``folder/name.json``, readable and stable under diff."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, allow_nan=False)
        (folder / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")


def save(found: dict[str, Any], path: Path) -> None:
    """Write what one file, run by hand, has found."""
    about = asdict(About.here(" ".join(["python", *sys.orig_argv[1:]])))
    text = json.dumps({"about": about, **found}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def filled(page: str, parts: Mapping[str, Iterable[str]]) -> str:
    """``page`` with other lines between ``<!-- NAME -->`` and ``<!-- end -->``, by name."""
    for name, lines in parts.items():
        text = "".join(f"{line}\n" for line in lines)
        place = rf"(?<=\n<!-- {name})([ :][^>]*>\n).*?(?=<!-- end -->)"
        if found := re.search(place, page, re.DOTALL):
            page = f"{page[: found.start()]}{found[1]}{text}{page[found.end() :]}"
    return page


def read(path: Path) -> Result:
    data = json.loads(path.read_text("utf-8"))
    return Result(data["name"], data["kind"], About(**data["about"]), data["found"])


def read_all(folder: Path) -> dict[str, Result]:
    """Every result in ``folder``, by name."""
    results = [read(path) for path in sorted(folder.glob("*.json"))]
    return {result.name: result for result in results}


def _machine() -> str:
    cpus = Path("/proc/cpuinfo")
    model = platform.machine()
    if cpus.exists():
        lines = [line for line in cpus.read_text().splitlines() if line.startswith(CPU_MODEL)]
        model += f" ({lines[0].partition(':')[2].strip()})" if lines else ""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.release()}"
    return f"{model}, {cores} cores, {pages:.0f} GiB, {system}"


def _commit() -> str:
    """The commit that was measured; ``+`` if files differed from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
