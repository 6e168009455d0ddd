"""Check what the built sdists and wheels carry.

Usage: python tools/check_dist.py DIST_FOLDER
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from workspace import Distribution, distributions

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]


def check_wheel(wheel: Path, dist: Distribution) -> Iterator[str]:
    """The package and nothing else, typed and licensed."""
    stem = f"{dist.import_name}-{dist.version}"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        strangers = {name.split("/")[0] for name in names} - {dist.import_name, f"{stem}.dist-info"}
        if strangers:
            yield f"{wheel.name}: installs {sorted(strangers)} beside {dist.import_name}"
        if f"{dist.import_name}/py.typed" not in names:
            yield f"{wheel.name}: py.typed is missing"
        licence = f"{stem}.dist-info/licenses/LICENSE"
        if licence not in names:
            yield f"{wheel.name}: LICENSE is missing"
        elif archive.read(licence) != (dist.folder / "LICENSE").read_bytes():
            yield f"{wheel.name}: LICENSE differs from the one in {dist.folder}"


def check_sdist(sdist: Path, dist: Distribution) -> Iterator[str]:
    """Everything that is needed to build the wheel and run the tests."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"LICENSE", "README.md", "pyproject.toml", f"src/{dist.import_name}/py.typed"}
    tests = dist.folder / "tests"
    expected |= {path.relative_to(dist.folder).as_posix() for path in tests.rglob("*.py")}
    for name in sorted(expected - names):
        yield f"{sdist.name}: {name} is missing"


def problems(root: Path, folder: Path) -> Iterator[str]:
    """Everything that is wrong, one line each."""
    for dist in distributions(root):
        stem = folder / f"{dist.import_name}-{dist.version}"
        for path, check in (
            (Path(f"{stem}-py3-none-any.whl"), check_wheel),
            (Path(f"{stem}.tar.gz"), check_sdist),
        ):
            if path.is_file():
                yield from check(path, dist)
            else:
                yield f"{path.name}: was not built"


def main(arguments: list[str]) -> int:
    """Print the problems; 1 if there are any."""
    found = list(problems(ROOT, Path(arguments[0])))
    print("\n".join(found) or "dist: every sdist and wheel carries what it should")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
