"""Build the documentation as a site: ``python tools/build_site.py [FOLDER]`` (default build/site).

Pages stay readable where they are. They are copied into FOLDER's ``source/`` under the addresses
they get, with links that hold there, a table of contents from the links of index pages, and a page
a public module. Sphinx makes ``FOLDER/html/VERSION/`` of them, with warnings as errors; versions
built before stay beside it, and ``versions.js`` lists them all. Nothing is fetched, then or later.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

from website.contents import Part, contents, toctree
from website.links import LinkError, Map, asset
from website.names import public_modules, reference
from website.pages import START, pages
from workspace import CORE, distributions

ROOT = Path(__file__).parents[1]
REFERENCE = PurePosixPath("reference", "api.md")
"""The page under which the pages of public modules hang."""
FRONT = """\
<!doctype html>
<meta charset="utf-8">
<title>polyshard</title>
<meta http-equiv="refresh" content="0; url={version}/index.html">
<a href="{version}/index.html">polyshard {version}</a>
"""


def stage(root: Path, folder: Path) -> None:
    """Copy every page, and the files it links, into ``folder``, as Sphinx is to see them.

    Raises:
        LinkError: every link that leads nowhere, a line each.
    """
    places = pages(root)
    on_site = Map(root, places)
    texts: dict[PurePosixPath, str] = {}
    problems = []
    for file, place in places.items():
        try:
            texts[place] = on_site.moved(file, file.read_text("utf-8"))
        except LinkError as error:
            problems.append(str(error))
    if problems:
        raise LinkError("\n".join(problems))
    hanging = contents(texts, PurePosixPath(START))
    made = {
        REFERENCE.with_suffix("") / f"{module}.rst": text
        for module, text in reference(public_modules(root)).items()
    }
    hanging[REFERENCE] = (Part("", {path: path.stem for path in made}),)
    for place, parts in hanging.items():
        texts[place] += "".join(toctree(place, part) for part in parts)
    texts |= made
    for place, text in texts.items():
        _write(folder / place, text)
    _copy_linked(on_site, folder)


def _copy_linked(on_site: Map, folder: Path) -> None:
    for file in on_site.linked_files():
        target = folder / asset(file.relative_to(on_site.root))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def version(root: Path) -> str:
    """The version that the site is of: major and minor, as the folder is called."""
    core = next(dist for dist in distributions(root) if dist.name == CORE)
    return ".".join(str(core.version).split(".")[:2])


def list_versions(html: Path) -> list[str]:
    """Write what lies beside the versions in ``html``; the versions, newest first."""
    numbered = [path.name for path in html.iterdir() if re.fullmatch(r"\d+\.\d+", path.name)]
    found = sorted(numbered, key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    _write(html / "versions.js", f"window.siteVersions = {json.dumps(found)};\n")
    _write(html / "index.html", FRONT.format(version=found[0]))
    return found


def main(arguments: list[str]) -> int:
    """Build; the exit status of Sphinx, or 2 where a link leads nowhere."""
    folder = Path(arguments[0]) if arguments else ROOT / "build" / "site"
    source, html = folder / "source", folder / "html"
    shutil.rmtree(source, ignore_errors=True)
    try:
        stage(ROOT, source)
    except LinkError as error:
        print(error, file=sys.stderr)
        return 2
    target = html / version(ROOT)
    shutil.rmtree(target, ignore_errors=True)
    options = ["-W", "--keep-going", "-q", "-b", "html", "-c", str(ROOT / "docs")]
    command = [sys.executable, "-m", "sphinx", *options, "-d", str(folder / "doctrees")]
    done = subprocess.run([*command, str(source), str(target)], check=False)
    if done.returncode == 0:
        print(f"site: {', '.join(list_versions(html))} in {html}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
