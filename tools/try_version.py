"""Try the wheels with one torch and one Python, in an environment made for it and deleted after.

Usage: python tools/try_version.py --torch "2.12.*" --python 3.12 --dist FOLDER \
    [--sample] [--core] [--plugins] [--minutes 60]

Exits with 1 if anything fails, with 77 where this machine has no such interpreter. What was found
goes into docs/reference/versions.json either way; python tools/make_version_docs.py makes the page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from subsets import NEUTRAL
from trial_environment import Budget, Environment, Outcome, commit, interpreter
from workspace import CORE, distributions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "reference" / "versions.json"
NO_INTERPRETER = 77
NOT_RUN = "not run"
STOPPED = f"{NOT_RUN}: the trial was stopped"
TIME_IS_OVER = f"{NOT_RUN}: the trial's time was over"
NOT_FINE = (Outcome.FAILED, Outcome.CUT, NOT_RUN)
"""How what is said of a part begins where it is not fine."""
ROOM_BYTES = 12 << 30
"""A CUDA build of torch, its archives while they are unpacked, and what tests write."""

Record = dict[str, Any]


def plugin_names() -> list[str]:
    """Every plugin distribution of this repository."""
    return [dist.name for dist in distributions(ROOT) if dist.folder.parent.name == "plugins"]


def subset_name(names: list[str]) -> str:
    """``core``, ``offload``, ``offload+quantized``, ..."""
    return "+".join(name.removeprefix(f"{CORE}-") for name in sorted(names)) or "core"


def subsets(names: list[str]) -> list[list[str]]:
    """All of them, each differing from the one before by one plugin (a Gray code)."""
    codes = [number ^ (number >> 1) for number in range(2 ** len(names))]
    return [[name for bit, name in enumerate(names) if code >> bit & 1] for code in codes]


def sampled(names: list[str]) -> list[list[str]]:
    """Every subset of the plugins that are combined, each of the others alone, and all."""
    composed = [name for name in names if name not in NEUTRAL]
    return [*subsets(composed), *([name] for name in names if name in NEUTRAL), names]


def conformance_files(names: list[str]) -> list[str]:
    """Test files that put the plugins ``names``, or core's own parts, through the conformance kit.

    Those that judge the kit itself, by dozens of plugins, are left to core's suite. A plugin that
    the kit does not fit (it changes nothing of one group, or all of training) has its
    ``test_plugin.py`` run, or where there is none all of its tests.
    """
    if not names:
        return ["packages/polyshard/tests/testing/test_conformance.py"]
    folders = [ROOT / "plugins" / name / "tests" for name in names]
    return [str(file.relative_to(ROOT)) for folder in folders for file in _telling(folder)]


def _telling(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("test_*.py"))
    kit = [file for file in files if "PluginConformance" in file.read_text("utf-8")]
    return kit or [file for file in files if file.name == "test_plugin.py"] or files


def test_requirements() -> list[str]:
    """The packages that the tests need."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    return [need for need in [*groups["test"], *groups["type"]] if isinstance(need, str)]


@dataclass(frozen=True)
class Part:
    """One cell of what is kept: what is installed beside core, and what is run then."""

    heading: str
    name: str
    held: list[str]
    run: Callable[[Environment], Outcome]

    def outcome(self, env: Environment) -> str:
        """Install and run it, or say why not."""
        if not env.budget.seconds():
            return TIME_IS_OVER
        held = env.hold(self.held, plugin_names())
        return str(self.run(env) if held else held)


def parts(options: argparse.Namespace) -> list[Part]:
    """Everything that a trial runs, what tells most first."""
    names = plugin_names()
    sets = sampled(names) if options.sample else subsets(names)
    script = ROOT / "tools" / "user_script.py"
    alone = [_conformance([name]) for name in names]
    suites = [_suite([name], f"plugins/{name}/tests") for name in names]
    return [
        *map(_smoke, sets),
        Part("checks", "pip check with every plugin", names, lambda env: env.pip("check")),
        Part("checks", "mypy --strict of a user's script", names, lambda env: env.mypy(script)),
        _conformance([]),
        _conformance(names),
        *([_suite([], "packages/polyshard/tests")] if options.core else []),
        *(suites if options.plugins else [] if options.sample else alone),
    ]


def _smoke(held: list[str]) -> Part:
    return Part("smoke", subset_name(held), held, lambda env: env.smoke([CORE, *held]))


def _conformance(held: list[str]) -> Part:
    files = conformance_files(held)
    return Part("conformance", subset_name(held), held, lambda env: env.pytest(*files))


def _suite(held: list[str], folder: str) -> Part:
    return Part("suites", subset_name(held), held, lambda env: env.pytest(folder))


def try_everything(env: Environment, options: argparse.Namespace) -> Iterator[Record]:
    """Install, check and test; after each step what is known of this torch with this Python.

    Each part has its cell from the start: a trial that is killed leaves a reason in every one.
    """
    core = f"{env.wheel(CORE)}[cli,new,testing]"
    ready = env.pip("install", f"torch=={options.torch}", core)
    ready = ready and env.pip("install", *test_requirements())
    record: Record = env.about(options.torch)
    if not ready:
        yield record | {"install": str(ready)}
        return
    record["checks"] = {"pip check": str(env.pip("check"))}
    planned = parts(options)
    for part in planned:
        record.setdefault(part.heading, {})[part.name] = STOPPED
    for part in planned:
        yield record
        record[part.heading][part.name] = part.outcome(env)
    yield record


def not_fine(record: Record) -> Iterator[tuple[str, str, str]]:
    """Heading, name of the part (none of what has no parts) and what is said of it."""
    for heading, value in record.items():
        for name, said in (value if isinstance(value, dict) else {"": value}).items():
            if isinstance(said, str) and said.startswith(NOT_FINE):
                yield heading, name, said


def failures(record: Record) -> list[str]:
    """What of a record is not fine, one line each."""
    return [
        f"{heading} {name}: {said}".replace(" :", ":") for heading, name, said in not_fine(record)
    ]


def store(record: Record, results: Path) -> None:
    """Replace what is kept of the same torch and Python."""
    kept = json.loads(results.read_text("utf-8")) if results.exists() else []
    key = [_minor(str(record["torch"])), _minor(str(record["python"]))]
    kept = [one for one in kept if [_minor(one["torch"]), _minor(one["python"])] != key]
    kept = sorted([*kept, record], key=lambda one: (_order(one["torch"]), _order(one["python"])))
    results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _order(version: str) -> list[int]:
    return [int(part) for part in _minor(version).split(".")]


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="version, as after == in a requirement")
    parser.add_argument("--python", required=True, help="such as 3.12")
    parser.add_argument("--dist", required=True, type=Path, help="folder with the built wheels")
    parser.add_argument("--core", action="store_true", help="run the whole suite of core too")
    parser.add_argument("--plugins", action="store_true", help="and that of every plugin, alone")
    sample = "subsets of the plugins that are combined, the others alone, all; conformance of all"
    parser.add_argument("--sample", action="store_true", help=sample)
    minutes = "after so many the rest is left out, and said to be; default: 360"
    parser.add_argument("--minutes", type=float, default=360.0, help=minutes)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Try one torch with one Python."""
    options = parsed(arguments)
    python = interpreter(options.python)
    if python is None:
        print(f"no interpreter of Python {options.python} on this machine: not tried")
        return NO_INTERPRETER
    with tempfile.TemporaryDirectory(prefix="polyshard-versions-") as folder:
        free = shutil.disk_usage(folder).free
        if free < ROOM_BYTES:
            print(f"{folder} has {free >> 30} GiB free, {ROOM_BYTES >> 30} GiB are needed")
            return 1
        budget = Budget.of(options.minutes)
        env = Environment.made(Path(folder), python, options.dist.resolve(), budget)
        about = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(ROOT)}
        # After each step, so that a trial that is stopped leaves what it found.
        for found in try_everything(env, options):
            record = found | about
            store(record, options.results)
    failed = failures(record)
    print("\n".join(failed) or f"torch {record['torch']}, Python {record['python']}: all fine")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
