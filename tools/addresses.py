"""Write `[project.urls]` of every distribution from the one place that has addresses.

Usage: python tools/addresses.py [--check]     (--check: only say whether all are current)

That place is `[tool.polyshard]` of the root pyproject.toml. Before the address of the repository is
known, distributions name none.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from workspace import Distribution, distributions

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^\[project\.urls\]\n(?:.+\n)*\n", re.MULTILINE)
BEFORE = "[tool.hatch.version]\n"


def repository(root: Path) -> str:
    """The public address of the repository; empty while there is none."""
    table = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    return str(table["tool"]["polyshard"]["repository"]).rstrip("/")


def urls(root: Path) -> dict[str, str]:
    """What every distribution says, the same for all."""
    home = repository(root)
    if not home:
        return {}
    return {
        "Homepage": home,
        "Documentation": f"{home}/blob/main/docs/index.md",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def with_urls(text: str, addresses: dict[str, str]) -> str:
    """``text`` of a pyproject.toml with the table of ``addresses``."""
    lines = "".join(f'{name} = "{address}"\n' for name, address in addresses.items())
    table = f"[project.urls]\n{lines}\n" if lines else ""
    return TABLE.sub("", text).replace(BEFORE, table + BEFORE, 1)


def outdated(root: Path) -> list[Distribution]:
    """The distributions that say something else."""
    wanted = urls(root)
    return [dist for dist in distributions(root) if dist.project.get("urls", {}) != wanted]


def main(arguments: list[str]) -> int:
    """Write, or check."""
    found = outdated(ROOT)
    for dist in found:
        if "--check" in arguments:
            print(f"{dist.folder}/pyproject.toml: [project.urls] is old: python tools/addresses.py")
        else:
            path = dist.folder / "pyproject.toml"
            path.write_text(with_urls(path.read_text("utf-8"), urls(ROOT)), encoding="utf-8")
    return 1 if found and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
