"""Render the plugin template: as the example kept in the repository, and once for each seam.

Usage: python tools/check_template.py TARGET      (renders into TARGET, an empty folder)
       python tools/check_template.py --update    (rewrites examples/third-party-plugin)

TARGET/example is compared with what is kept. TARGET/seams/SEAM is a plugin of another name for each
choice of seam, in which nothing of the example's name may be left; their tests are the session's.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "packages" / "polyshard-cli" / "src" / "polyshard_cli" / "template"
EXAMPLE = ROOT / "examples" / "third-party-plugin"
ODD_NAME = "quokka_7"
LEFTOVER = re.compile(
    r"byte.?count\w*|bytecount\w*|byteobserver|announcer|\{\{|\}\}|\{%|polyshard[_-]example",
    re.IGNORECASE,
)
"""The example's name in any spelling, the tutorial's, and template code that was not rendered."""


def seams() -> list[str]:
    """The choices of seam, as folders of the template have them."""
    return sorted(path.stem for path in (TEMPLATE / "seams").glob("*.txt"))


def render(target: Path, **answers: str) -> None:
    """Render the template as ``polyshard plugins new`` does; by default, the example."""
    scaffold = importlib.import_module("polyshard_cli.scaffold")
    wanted = {"plugin": "byte_counter", "seam": "observer", **answers}
    scaffold.Scaffold(target=target, **wanted).render()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` that belongs to the plugin, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and ".pytest_cache" not in path.parts
    }


def differences(fresh: Path, kept: Path) -> list[str]:
    """Paths that differ, or are on one side only."""
    one, other = contents(fresh), contents(kept)
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def leftovers(folder: Path) -> list[str]:
    """Where a rendered plugin says the example's name, in a path or in a file."""
    found = []
    for path, content in contents(folder).items():
        lines = [path, *content.decode("utf-8").splitlines()]
        for number, line in enumerate(lines):
            found += [f"{path}:{number}: {match[0]!r}" for match in LEFTOVER.finditer(line)]
    return found


def check_seams(target: Path) -> list[str]:
    """Render every seam under an odd name; what is left of the example, or not valid Python."""
    found = []
    for seam in seams():
        render(target / seam, plugin=f"{ODD_NAME}_{seam}", seam=seam)
        found += [f"{seam}/{place}" for place in leftovers(target / seam)]
        for path in (target / seam).rglob("*.py"):
            compile(path.read_text("utf-8"), str(path), "exec")
    return found


def main() -> None:
    """Render, and compare or update."""
    if sys.argv[1:] == ["--update"]:
        shutil.rmtree(EXAMPLE, ignore_errors=True)
        render(EXAMPLE)
        return
    target = Path(sys.argv[1])
    render(target / "example")
    if different := differences(target / "example", EXAMPLE):
        sys.exit(
            "examples/third-party-plugin is not what the template renders: "
            f"{', '.join(different)}. Run python tools/check_template.py --update"
        )
    if found := check_seams(target / "seams"):
        sys.exit("the template leaves its example's name behind: " + ", ".join(found))


if __name__ == "__main__":
    main()
