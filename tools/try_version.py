"""Try the built wheels with one torch, in the environment that runs this (`nox -s versions`).

Usage: python tools/try_version.py TORCH DIST [--core] [--plugins]

Exits with 1 if anything fails. What was found goes into docs/reference/versions.json after each
part, so that a trial that is stopped leaves a reason in every cell that it did not reach.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from subsets import PLUGINS, SUBSETS, short
from torch_features import FEATURES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "reference" / "versions.json"
COMMAND_SECONDS = 3600
FAILED, CUT, NOT_RUN = "failed", "cut off", "not run"
"""How the words about a part begin where it is not fine."""
STOPPED = f"{NOT_RUN}: the trial was stopped"

Record = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One cell: what is installed beside core, and the arguments of Python that are run then."""

    heading: str
    name: str
    held: list[str]
    arguments: tuple[str, ...]


def parts(options: argparse.Namespace) -> Iterator[Part]:
    """Everything that a trial runs, what tells most first."""
    for name, held in SUBSETS.items():
        smoke = ("-I", str(ROOT / "tools" / "smoke.py"), "polyshard", *held)
        yield Part("smoke", name, held, smoke)
    yield Part("checks", "pip check with every plugin", PLUGINS, ("-m", "pip", "check"))
    mypy = ("-m", "mypy", "--strict", "--config-file=", str(ROOT / "tools" / "user_script.py"))
    yield Part("checks", "mypy --strict of a user's script", PLUGINS, mypy)
    yield Part("conformance", "core", [], pytest(*conformance_files([])))
    yield Part("conformance", "all", PLUGINS, pytest(*conformance_files(PLUGINS)))
    if options.core:
        yield Part("suites", "core", [], pytest("packages/polyshard/tests"))
    for plugin in PLUGINS if options.plugins else ():
        yield Part("suites", short(plugin), [plugin], pytest(f"plugins/{plugin}/tests"))


def pytest(*paths: str) -> tuple[str, ...]:
    """Run tests of the checkout against the installed wheels."""
    quiet = ("-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={ROOT}")
    return ("-m", "pytest", *quiet, *(str(ROOT / path) for path in paths))


def conformance_files(plugins: list[str]) -> list[str]:
    """Test files that put ``plugins``, or core's own parts, through the conformance kit.

    Those that judge the kit itself, by dozens of plugins, are left to core's suite. A plugin that
    the kit does not fit (it changes nothing of one group, or all of training) has its
    ``test_plugin.py`` run, or where there is none all of its tests.
    """
    if not plugins:
        return ["packages/polyshard-testing/tests/test_conformance.py"]
    found = []
    for plugin in plugins:
        files = sorted((ROOT / "plugins" / plugin / "tests").rglob("test_*.py"))
        kit = [file for file in files if "PluginConformance" in file.read_text("utf-8")]
        found += kit or [file for file in files if file.name == "test_plugin.py"] or files
    return [str(file.relative_to(ROOT)) for file in found]


def run(*arguments: str) -> str:
    """Run this Python where it sees nothing of the checkout; the last line, or what went wrong."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    print("$", " ".join(arguments), flush=True)
    with tempfile.TemporaryDirectory() as empty, Path(empty, "output").open("w+") as output:
        env |= {"OMP_NUM_THREADS": "1", "MYPY_CACHE_DIR": empty}
        command = [sys.executable, *arguments]
        where: dict[str, Any] = {"cwd": empty, "env": env, "stdout": output}
        try:
            # A file and no pipe, which a rank that is left over would hold open.
            done = subprocess.run(
                command, **where, stderr=subprocess.STDOUT, timeout=COMMAND_SECONDS, check=False
            )
            how = f"{FAILED}: " if done.returncode else ""
        except subprocess.TimeoutExpired:
            how = f"{CUT} after {COMMAND_SECONDS // 60} min: "
        output.seek(0)
        text = output.read()
    print(text[-8000:] if how else "", end="", flush=True)
    return how + summary(text)


def summary(output: str) -> str:
    """The last line, without seconds; before it the tests that failed, by name."""
    lines = [line for line in output.splitlines() if line.strip()]
    last = re.sub(r" in [\d.]+s( \([\d:]+\))?$", "", lines[-1].strip("= ")) if lines else ""
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    names = [line.split(" ", 1)[1].rpartition("/")[2] for line in failed]
    return f"{last} ({', '.join(names)})" if names else last


def is_fine(said: str) -> bool:
    """Whether a part was run, to its end, without an error."""
    return not said.startswith((FAILED, CUT, NOT_RUN))


def hold(wanted: list[str], dist: Path) -> str:
    """Have exactly the plugins ``wanted`` installed."""
    held = {found.name for found in distributions()}.intersection(PLUGINS)
    said = ""
    if absent := held.difference(wanted):
        said = run("-m", "pip", "uninstall", "--yes", *sorted(absent))
    # Not --no-deps: a plugin whose wheel asks for more than core's has to say so here.
    if is_fine(said) and (new := [wheel(name, dist) for name in wanted if name not in held]):
        said = run("-m", "pip", "install", *new)
    return said


def wheel(name: str, dist: Path) -> str:
    """The built wheel of a distribution of this repository."""
    (found,) = dist.glob(f"{name.replace('-', '_')}-*.whl")
    return str(found)


def try_everything(options: argparse.Namespace) -> Iterator[Record]:
    """Install, check and test; after each part what is known of this torch with this Python."""
    commit = ["git", "rev-parse", "--short", "HEAD"]
    record: Record = {
        "torch": options.torch,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.check_output(commit, cwd=ROOT, text=True).strip(),
    }
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    names = ("", "-cli", "-optimizers", "-resilience", "-testing")
    core = tuple(wheel(f"polyshard{name}", options.dist) for name in names)
    needs = (f"torch=={options.torch}", *core, *groups["test"], *groups["type"])
    said = run("-m", "pip", "install", *needs)
    if not is_fine(said):
        yield record | {"install": said}
        return
    record["torch"] = version("torch")
    record["features"] = {feature.name: feature.probe() for feature in FEATURES}
    record["checks"] = {"pip check": run("-m", "pip", "check")}
    planned = list(parts(options))
    for part in planned:
        record.setdefault(part.heading, {})[part.name] = STOPPED
    for part in planned:
        yield record
        said = hold(part.held, options.dist)
        record[part.heading][part.name] = run(*part.arguments) if is_fine(said) else said
    yield record


def not_fine(record: Record) -> Iterator[tuple[str, str, str]]:
    """Heading, name of the part (none of what has no parts) and the words about it."""
    for heading, value in record.items():
        for name, said in (value if isinstance(value, dict) else {"": value}).items():
            if isinstance(said, str) and not is_fine(said):
                yield heading, name, said


def store(record: Record, results: Path) -> None:
    """Replace what is kept of the same torch and Python."""
    kept = json.loads(results.read_text("utf-8")) if results.exists() else []
    kept = [one for one in kept if order(one) != order(record)]
    kept = sorted([*kept, record], key=order)
    results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def order(record: Record) -> list[int]:
    """By the first two numbers of torch, then of Python."""
    return [int(part) for key in ("torch", "python") for part in record[key].split(".")[:2]]


def main() -> int:
    """Try one torch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torch", help="version, as after == in a requirement")
    parser.add_argument("dist", type=Path, help="folder with the built wheels")
    parser.add_argument("--core", action="store_true", help="run the whole suite of core too")
    parser.add_argument("--plugins", action="store_true", help="and that of every plugin, alone")
    for record in try_everything(parser.parse_args()):
        store(record, RESULTS)
    failed = [" ".join(each) for each in not_fine(record)]
    print("\n".join(failed) or f"torch {record['torch']}, Python {record['python']}: all fine")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
