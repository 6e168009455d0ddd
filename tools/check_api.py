"""Compare the public names with those of the last release, and demand that breaks are told.

Usage: python tools/check_api.py [--update | --current]

The last release is the newest tag vX.Y.Z of an earlier commit; while there is none, what
tools/public_api.json holds. What breaks callers has to be named, in backticks, in the part of
CHANGELOG.md above that release; a version that differs in its last number only may break nothing;
and changed hooks have to change HOOK_API. `--update` writes the present names into the file, which
a release asks for (`--current`).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from api_changes import Break, breaks, hook_problems
from public_api import PublicApi, public_api
from workspace import CORE, distributions

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "tools" / "public_api.json"
TAG = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


def last_tag(root: Path) -> str | None:
    """The newest version that was released before the commit that is checked out."""
    merged = _tags(root, "--merged", "HEAD")
    here = _tags(root, "--points-at", "HEAD")  # the release that is being made
    return max(merged - here, key=numbers, default=None)


def _tags(root: Path, *which: str) -> set[str]:
    command = ["git", "tag", "--list", "v*", *which]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return {tag for tag in found.split() if TAG.fullmatch(tag)}


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of ``v1.2.3`` or ``1.2.3``."""
    return tuple(int(part) for part in version.removeprefix("v").split("."))


def api_at(root: Path, tag: str) -> PublicApi:
    """The public names of the files that ``tag`` holds."""
    command = ["git", "archive", tag]
    archive = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return public_api(Path(folder))


def news(changelog: str, tag: str | None) -> str:
    """What the changelog says of everything after the release ``tag``."""
    if tag is None:
        return changelog
    return re.split(rf"^## {re.escape(tag.removeprefix('v'))}\b", changelog, flags=re.MULTILINE)[0]


def untold(found: list[Break], told: str) -> list[Break]:
    """The breaks that ``told`` does not name: all of the name, or its last one or two parts."""
    words = set(re.findall(r"`([\w.]+)(?:\([^`]*\))?`", told))
    return [
        each
        for each in found
        if not words & {each.name, ".".join(each.name.split(".")[-2:]), each.name.split(".")[-1]}
    ]


def problems(root: Path, old: PublicApi, new: PublicApi, tag: str | None) -> list[str]:
    """What has to be done about the difference, one line each."""
    found = breaks(old, new)
    lines = [
        f"{each} (since {tag or 'the names in tools/public_api.json'}): name it in CHANGELOG.md, "
        "with what to do"
        for each in untold(found, news((root / "CHANGELOG.md").read_text("utf-8"), tag))
    ]
    version = next(dist.version for dist in distributions(root) if dist.name == CORE)
    if tag and version and found:
        before, now = numbers(tag), numbers(version)
        if before != now and before[:2] == now[:2]:
            lines.append(
                f"{version} would break {len(found)} names of {tag}, the first {found[0].name}: a "
                "version that differs in its last number may not"
            )
    return lines + hook_problems(old, new)


def main(arguments: list[str]) -> int:
    """Compare, or write."""
    new = public_api(ROOT)
    if arguments == ["--update"]:
        BASELINE.write_text(new.to_json(), encoding="utf-8")
        return 0
    tag = last_tag(ROOT)
    old = api_at(ROOT, tag) if tag else PublicApi.from_json(BASELINE.read_text("utf-8"))
    found = problems(ROOT, old, new, tag)
    if "--current" in arguments and BASELINE.read_text("utf-8") != new.to_json():
        found.append("tools/public_api.json is old; run python tools/check_api.py --update")
    print("\n".join(found) or f"API: {len(new.names)} public names, nothing breaks untold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
