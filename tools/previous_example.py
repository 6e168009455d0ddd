"""Take the example plugin out of the last release of the minor version before this one.

Usage: python tools/previous_example.py FOLDER     (exits with 77 where there was no such release)

Its tests run against the present core: what an author wrote for the last version goes on working.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

from workspace import CORE, distributions

ROOT = Path(__file__).parents[1]
EXAMPLE = "examples/third-party-plugin"
TAG = re.compile(r"v(\d+)\.(\d+)\.(\d+)")
NONE = 77


def previous_tag(tags: list[str], version: str) -> str | None:
    """The newest of ``tags`` whose first two numbers are below those of ``version``."""
    numbers = {tag: tuple(map(int, m.groups())) for tag in tags if (m := TAG.fullmatch(tag))}
    present = tuple(int(part) for part in version.split(".")[:2])
    before = [tag for tag, found in numbers.items() if found[:2] < present]
    return max(before, key=lambda tag: numbers[tag], default=None)


def extract(root: Path, tag: str, target: Path) -> None:
    """Write the example as ``tag`` has it below ``target``."""
    command = ["git", "archive", tag, EXAMPLE]
    archive = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(target, filter="data")


def main(arguments: list[str]) -> int:
    """Extract it, or say that there is none."""
    version = next(dist.version for dist in distributions(ROOT) if dist.name == CORE) or "0"
    command = ["git", "tag", "--list", "v*"]
    tags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tag = previous_tag(tags.split(), version)
    if tag is None:
        print(f"no minor version before {version} was released: there is no example to test")
        return NONE
    extract(ROOT, tag, Path(arguments[0]))
    print(f"the example plugin of {tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
