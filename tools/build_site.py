"""Build the documentation as a site: ``python tools/build_site.py [FOLDER]`` (default build/site).

Sphinx reads the pages where they are (docs/conf.py says which) and makes ``FOLDER/html/VERSION/``
of them, with warnings as errors; versions built before stay beside it, and ``versions.js`` lists
them all. Nothing is fetched, then or later. With ``--linkcheck`` Sphinx asks every address outside
of the repository instead, which needs a network.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from workspace import CORE, distributions

ROOT = Path(__file__).parents[1]
FRONT = """\
<!doctype html>
<meta charset="utf-8">
<title>polyshard</title>
<meta http-equiv="refresh" content="0; url={version}/docs/index.html">
<a href="{version}/docs/index.html">polyshard {version}</a>
"""


def version(root: Path) -> str:
    """The version that the site is of: major and minor, as the folder is called."""
    core = next(dist for dist in distributions(root) if dist.name == CORE)
    return ".".join(str(core.version).split(".")[:2])


def list_versions(html: Path) -> list[str]:
    """Write what lies beside the versions in ``html``; the versions, newest first."""
    numbered = [path.name for path in html.iterdir() if re.fullmatch(r"\d+\.\d+", path.name)]
    found = sorted(numbered, key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    (html / "versions.js").write_text(f"window.siteVersions = {json.dumps(found)};\n", "utf-8")
    (html / "index.html").write_text(FRONT.format(version=found[0]), "utf-8")
    return found


def main(arguments: list[str]) -> int:
    """Build, or check links; the exit status of Sphinx."""
    names = [argument for argument in arguments if not argument.startswith("--")]
    folder = Path(names[0]) if names else ROOT / "build" / "site"
    builder = "linkcheck" if "--linkcheck" in arguments else "html"
    target = folder / builder / version(ROOT)
    shutil.rmtree(target, ignore_errors=True)
    options = ["-E", "-W", "--keep-going", "-q", "-b", builder, "-c", str(ROOT / "docs")]
    command = [sys.executable, "-m", "sphinx", *options, "-d", str(folder / "doctrees")]
    done = subprocess.run([*command, str(ROOT), str(target)], check=False)
    if done.returncode == 0 and builder == "html":
        print(f"site: {', '.join(list_versions(target.parent))} in {target.parent}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
