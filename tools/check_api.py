"""Compare the public names with those of the last release, and demand that breaks are told.

Usage: python tools/check_api.py

Public is what the modules in the table of docs/reference/api.md export. The last release is the
newest tag vX.Y.Z of an earlier commit; before the first, the commit that `[tool.polyshard]` of
pyproject.toml names. griffe finds what breaks callers: each has to be named, in backticks, in the
part of CHANGELOG.md above that release; a version that differs in its last number only may break
nothing; and changed hooks have to change HOOK_API. Nothing is imported, so torch is not needed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

import griffe
from griffe import BreakageKind

from workspace import CORE, distributions, public_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
TAG = re.compile(r"v(\d+)\.(\d+)\.(\d+)")
COLOUR = re.compile(r"\x1b\[\d+m")
ALLOWED = {BreakageKind.PARAMETER_CHANGED_DEFAULT, BreakageKind.RETURN_CHANGED_TYPE}
"""What griffe reports and calls survive; mypy sees the types."""


@dataclass(frozen=True)
class Api:
    """The public modules of a checkout, its hooks with their arguments, and their version."""

    modules: dict[str, griffe.Module]
    hooks: frozenset[str]
    hook_api: tuple[int, ...]
    version: str

    @classmethod
    def of(cls, root: Path) -> Api:
        """Read the files below ``root``."""
        dists = distributions(root)
        loader = griffe.GriffeLoader(search_paths=[str(dist.folder / "src") for dist in dists])
        for dist in dists:
            loader.load(dist.import_name)
        loader.resolve_aliases(implicit=False, external=False)
        found = loader.modules_collection
        hooks = set()
        for name, spec in found[f"{CORE}.plugins.hookspecs"].functions.items():
            if not name.startswith("_"):
                hooks |= {name, *(f"{name}({parameter.name})" for parameter in spec.parameters)}
        hook_api = numbers(str(found[f"{CORE}.plugins.contract.HOOK_API"].value))
        version = next(dist.version for dist in dists if dist.name == CORE)
        modules = {path: found[path] for path in public_modules(root)}
        for module in modules.values():  # rooms below one are public only where they are listed
            for name, member in list(module.members.items()):
                if not member.is_alias and member.is_module:
                    del module.members[name]
        return cls(modules, frozenset(hooks), hook_api, version or "")

    @classmethod
    def at(cls, root: Path, revision: str) -> Api:
        """Read the files that a tag or a commit holds."""
        archive = subprocess.run(
            ["git", "archive", "--format=zip", revision], cwd=root, capture_output=True, check=True
        ).stdout
        with tempfile.TemporaryDirectory() as folder:
            with ZipFile(BytesIO(archive)) as files:
                files.extractall(folder)
            return cls.of(Path(folder))


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of ``v1.2.3``, ``1.2.3`` or ``(1, 2)``."""
    return tuple(map(int, re.findall(r"\d+", version)))


def last_release(root: Path) -> str:
    """The newest version before the commit that is checked out, or what stands for the first."""
    merged, here = _tags(root, "--merged"), _tags(root, "--points-at")
    if before := merged - here:  # a tag here is the release that is being made
        return max(before, key=numbers)
    table = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    return str(table["tool"]["polyshard"]["names-since"])


def _tags(root: Path, which: str) -> set[str]:
    command = ["git", "tag", "--list", "v*", which, "HEAD"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return {tag for tag in found.split() if TAG.fullmatch(tag)}


def breaks(old: Api, new: Api) -> dict[str, str]:
    """What stops working for callers: names, and how."""
    found = {path: f"{path}: the module is gone" for path in old.modules.keys() - new.modules}
    for path in old.modules.keys() & new.modules:
        before, now = old.modules[path], new.modules[path]
        for name in set(map(str, before.exports or ())) - set(map(str, now.exports or now.members)):
            found[f"{path}.{name}"] = f"{path}.{name}: is not exported any more"
        for each in griffe.find_breaking_changes(before, now):
            if each.kind not in ALLOWED and not each.obj.name.startswith("_"):
                said = COLOUR.sub("", each.explain(griffe.ExplanationStyle.ONE_LINE))
                found[each.obj.path] = f"{each.obj.path}: {said.partition(': ')[2]}"
    return found


def hook_problems(old: Api, new: Api) -> Iterator[str]:
    """Changes of hooks that ``HOOK_API`` does not tell plugins of."""
    gone, added = sorted(old.hooks - new.hooks), sorted(new.hooks - old.hooks)
    said = f"HOOK_API {new.hook_api}:"
    if gone and new.hook_api[0] == old.hook_api[0]:
        yield f"{said} {', '.join(gone)} cannot be implemented any more; raise the first number"
    elif added and new.hook_api == old.hook_api:
        yield f"{said} {', '.join(added)} is new; raise the second number"


def news(changelog: str, since: str) -> str:
    """What the changelog says of everything after the release ``since``."""
    return re.split(rf"^## {re.escape(since.removeprefix('v'))}\b", changelog, flags=re.M)[0]


def is_told(name: str, told: str) -> bool:
    """Whether ``told`` names it: all of the name, or its last one or two parts."""
    words = set(re.findall(r"`([\w.]+)(?:\([^`]*\))?`", told))
    parts = name.split(".")
    return bool(words & {name, ".".join(parts[-2:]), parts[-1]})


def problems(root: Path, old: Api, new: Api, since: str) -> Iterator[str]:
    """What has to be done about the difference, one line each."""
    found = breaks(old, new)
    told = news((root / "CHANGELOG.md").read_text("utf-8"), since)
    for name, how in sorted(found.items()):
        if not is_told(name, told):
            yield f"{how} (since {since}): name it in CHANGELOG.md, with what to do"
    is_patch = old.version != new.version and numbers(old.version)[:2] == numbers(new.version)[:2]
    if found and is_patch:
        yield (
            f"{new.version} would break {len(found)} names of {since}, the first {min(found)}: a "
            "version that differs in its last number may not"
        )
    yield from hook_problems(old, new)


def main() -> int:
    """Compare; 1 if something is left to do."""
    since = last_release(ROOT)
    found = list(problems(ROOT, Api.at(ROOT, since), Api.of(ROOT), since))
    print("\n".join(found) or f"API: nothing that {since} had breaks untold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
