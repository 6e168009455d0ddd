"""What has to be true before a release, and what is left to do then.

Usage: python tools/release.py check [--tagged]     (--tagged: the tag is there already, on HEAD)
       python tools/release.py notes                (prints the changelog's part of this version)
       python tools/release.py next                 (prints the commands that publish)

docs/how-to/release.md is the checklist; `nox -s release` runs it up to the upload.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from addresses import outdated, repository
from check_layout import check_versions
from workspace import CORE, distributions

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
DATED = re.compile(r"(\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})")


def version_of(root: Path) -> str:
    """The version that all distributions carry."""
    return next(dist.version for dist in distributions(root) if dist.name == CORE) or "?"


def sections(root: Path) -> list[tuple[str, str]]:
    """Headings and texts of the changelog, the newest first."""
    parts = [part.strip() for part in SECTION.split((root / "CHANGELOG.md").read_text("utf-8"))[1:]]
    return list(zip(parts[::2], parts[1::2], strict=True))


def check_tree(root: Path) -> Iterator[str]:
    """What is released is what is committed."""
    if changed := _git(root, "status", "--porcelain").splitlines():
        yield f"{len(changed)} files are not committed, the first: {changed[0][3:]}"


def check_tag(root: Path, *, is_tagged: bool) -> Iterator[str]:
    """The tag is new; or, where it triggered the release, names this commit."""
    tag = f"v{version_of(root)}"
    there = _git(root, "tag", "--points-at", "HEAD").split()
    if is_tagged and tag not in there:
        yield f"HEAD has no tag {tag}, but {', '.join(there) or 'none'}: the tag is the version"
    if not is_tagged and _git(root, "tag", "--list", tag):
        yield f"{tag} is released already; raise __version__ in every __about__.py"


def check_changelog(root: Path) -> Iterator[str]:
    """Nothing is left under Unreleased, and the newest section is this version's, dated."""
    version, found = version_of(root), sections(root)
    if not found or found[0][0] != "Unreleased":
        yield "CHANGELOG.md: the first section must be '## Unreleased', for what comes next"
        return
    if found[0][1]:
        yield f"CHANGELOG.md: move what is under Unreleased to '## {version} - YYYY-MM-DD'"
    dated = DATED.fullmatch(found[1][0]) if len(found) > 1 else None
    if dated is None or dated[1] != version:
        yield f"CHANGELOG.md: the section after Unreleased must be '## {version} - YYYY-MM-DD'"
    elif not found[1][1]:
        yield f"CHANGELOG.md: the section of {version} is empty"


def check_citation(root: Path) -> Iterator[str]:
    """CITATION.cff speaks of this version, of the date in the changelog, and of the address."""
    text = (root / "CITATION.cff").read_text("utf-8")
    fields = dict(re.findall(r"^([\w-]+): \"?([^\"\n]+)\"?$", text, re.MULTILINE))
    found = sections(root)
    dated = DATED.fullmatch(found[1][0]) if len(found) > 1 else None
    wanted = {"version": version_of(root), "repository-code": repository(root)}
    wanted |= {"date-released": dated[2]} if dated else {}
    for key, value in wanted.items():
        if value and fields.get(key) != value:
            yield f'CITATION.cff: {key} must be "{value}", is {fields.get(key, "missing")}'


def check_addresses(root: Path) -> Iterator[str]:
    """Users of the index can find the repository."""
    if not repository(root):
        yield "pyproject.toml: [tool.polyshard] repository is empty; write its public address"
    for dist in outdated(root):
        yield f"{dist.folder.name}: [project.urls] is old; run python tools/addresses.py"


def problems(root: Path, *, is_tagged: bool) -> list[str]:
    """Everything that stands between the checkout and a release, one line each."""
    return [
        *check_tree(root),
        *check_versions(distributions(root)),
        *check_tag(root, is_tagged=is_tagged),
        *check_changelog(root),
        *check_citation(root),
        *check_addresses(root),
    ]


def next_steps(root: Path) -> str:
    """What a maintainer types; everything after is the workflow's."""
    tag = f"v{version_of(root)}"
    return (
        f"ready: {tag}, built in dist/. Nothing was tagged or sent. To publish:\n"
        f"  git tag --annotate {tag} --message 'polyshard {tag[1:]}'\n"
        f"  git push origin {tag}      # .github/workflows/release.yml does the rest"
    )


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def main(arguments: list[str]) -> int:
    """Check, or print."""
    if arguments[:1] == ["notes"]:
        print(sections(ROOT)[1][1])
        return 0
    if arguments[:1] == ["next"]:
        print(next_steps(ROOT))
        return 0
    found = problems(ROOT, is_tagged="--tagged" in arguments)
    print("\n".join(found) or f"release: {version_of(ROOT)} may be built")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
