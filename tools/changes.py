"""Which nightly sessions a branch needs in its gate, by the paths it changes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from subsets import PLUGINS, short

__all__ = ["NIGHTLY", "changed_paths", "nightly_parts"]

ROOT = Path(__file__).parents[1]

# Sessions of `nox -s nightly`, and the paths whose change brings one into the gate.
NIGHTLY = {
    "site": ("docs/", "tools/build_site.py"),
    "pages": ("docs/_", "packages/polyshard-cli/src/polyshard_cli/plan/page/", "tools/headless"),
    "template": (
        "packages/polyshard-cli/src/polyshard_cli/template/",
        "examples/third-party-plugin/",
    ),
    "gallery": ("examples/plugins/",),
}


def changed_paths() -> list[str]:
    """Paths that differ from the main branch (``POLYSHARD_BASE``, by default ``origin/main``).

    Empty where git does not know that branch, as in an archive, and on the main branch itself.
    """
    base = os.environ.get("POLYSHARD_BASE", "origin/main")
    diff = ("git", "diff", "--name-only", "--merge-base", base)
    found = subprocess.run(diff, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.splitlines() if found.returncode == 0 else []


def nightly_parts(paths: list[str]) -> list[str]:
    """Nightly sessions that look at one of ``paths``; a plugin's is its subset, uninstalled."""
    parts = [
        session
        for session, prefixes in NIGHTLY.items()
        if any(path.startswith(prefixes) for path in paths)
    ]
    for name in PLUGINS:
        if any(path.startswith(f"plugins/{name}/") for path in paths):
            parts.append(f"subsets({short(name)})")
    return parts
