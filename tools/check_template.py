"""Render the plugin template and compare it with the example kept in the repository.

Usage: python tools/check_template.py TARGET      (renders into TARGET, an empty folder)
       python tools/check_template.py --update    (rewrites examples/third-party-plugin)
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "template"
EXAMPLE = ROOT / "examples" / "third-party-plugin"


def render(target: Path) -> None:
    """Render the template with its default answers."""
    copier = importlib.import_module("copier")  # only the template session installs it
    copier.run_copy(str(TEMPLATE), str(target), defaults=True, quiet=True)


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


def main() -> None:
    """Render, and compare or update."""
    if sys.argv[1:] == ["--update"]:
        shutil.rmtree(EXAMPLE, ignore_errors=True)
        render(EXAMPLE)
        return
    target = Path(sys.argv[1])
    render(target)
    if different := differences(target, EXAMPLE):
        sys.exit(
            "examples/third-party-plugin is not what the template renders: "
            f"{', '.join(different)}. Run python tools/check_template.py --update"
        )


if __name__ == "__main__":
    main()
