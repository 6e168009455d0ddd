"""Check what no other tool looks at: licences, versions, bounds, file sizes, stray paths.

Usage: python tools/check_layout.py [ROOT]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from workspace import CORE, ENTRY_POINT_GROUP, Distribution, distributions

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LINES = 800
# Roots of private machines; spelt without slashes so that this file passes its own check.
PRIVATE_ROOTS = ("work", "farm")
PRIVATE_PATH = re.compile(rf"(?<![\w.])/(?:{'|'.join(PRIVATE_ROOTS)})/")


def check_names(dists: list[Distribution]) -> Iterator[str]:
    """Folder, distribution and import package are called the same; the package is typed."""
    if CORE not in {dist.name for dist in dists}:
        yield f"packages/: no distribution is called {CORE!r}"
    for dist in dists:
        if dist.name != dist.folder.name:
            yield f"{dist.folder}: the folder of {dist.name!r} has another name"
        if not (dist.source / "py.typed").is_file():
            yield f"{dist.source}: py.typed is missing, so type checkers ignore the annotations"


def check_licences(root: Path, dists: list[Distribution]) -> Iterator[str]:
    """Each distribution carries a real copy of the root licence: a symlink breaks its sdist."""
    expected = (root / "LICENSE").read_bytes()
    for path in (dist.folder / "LICENSE" for dist in dists):
        if not path.is_file() or path.is_symlink():
            yield f"{path}: must be a real file, a copy of LICENSE at the root"
        elif path.read_bytes() != expected:
            yield f"{path}: differs from LICENSE at the root"


def check_versions(dists: list[Distribution]) -> Iterator[str]:
    """All distributions carry one version, and each plugin's bounds on core admit it, capped."""
    core = next((dist.version for dist in dists if dist.name == CORE), None)
    for dist in dists:
        if dist.version is None:
            yield f'{dist.source}/__about__.py: no line `__version__ = "..."`'
        elif dist.version != core:
            yield f"{dist.source}/__about__.py: version {dist.version}, but core has {core}"
        if dist.name != CORE and core is not None:
            yield from _check_bounds(dist, core)


def _check_bounds(dist: Distribution, core: str) -> Iterator[str]:
    requirements = map(Requirement, dist.project.get("dependencies", ()))
    bounds = next((need.specifier for need in requirements if need.name == CORE), None)
    where = f"{dist.folder}/pyproject.toml"
    if bounds is None:
        if ENTRY_POINT_GROUP in dist.entry_points:
            yield f"{where}: a plugin must depend on {CORE}"
    elif not bounds.contains(core):
        yield f"{where}: {CORE}{bounds} does not admit core's version {core}"
    elif not any(bound.operator in {"<", "<=", "~=", "=="} for bound in bounds):
        yield f"{where}: {CORE}{bounds} has no upper bound"


def check_lengths(root: Path, files: list[Path]) -> Iterator[str]:
    """No source file is longer than a reader's patience; tests may be."""
    for path in files:
        is_test = "tests" in path.parts or path.parts[0] == "integration_tests"
        if path.suffix == ".py" and not is_test:
            length = len((root / path).read_text("utf-8").splitlines())
            if length > MAX_LINES:
                yield f"{path}: {length} lines, {MAX_LINES} allowed"


def check_private_paths(root: Path, files: list[Path]) -> Iterator[str]:
    """No file mentions a folder that exists only on one machine."""
    for path in files:
        text = (root / path).read_text("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            if match := PRIVATE_PATH.search(line):
                yield f"{path}:{number}: mentions a private path below {match[0]}"


def repository_files(root: Path) -> list[Path]:
    """Files that are tracked or could be: everything git does not ignore, relative to ``root``."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in sorted(set(listing.split("\0"))) if name]
    return [path for path in paths if (root / path).is_file()]


def problems(root: Path) -> list[str]:
    """Everything that is wrong, one line each."""
    dists, files = distributions(root), repository_files(root)
    return [
        *check_names(dists),
        *check_licences(root, dists),
        *check_versions(dists),
        *check_lengths(root, files),
        *check_private_paths(root, files),
    ]


def main(arguments: list[str]) -> int:
    """Print the problems; 1 if there are any."""
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    found = problems(root)
    print("\n".join(found) or "layout: nothing to complain about")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
