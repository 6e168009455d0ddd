"""What is told about breaks; and the comparison with a tag, in repositories made for it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("griffe")
from check_api import ROOT, Api, breaks, hook_problems, is_told, last_release, news, problems
from workspace import public_modules

SOURCE = "__all__ = ['C', 'run']\nclass C:\n    def m(self): ...\ndef run(model, *, steps=1): ...\n"


@pytest.mark.parametrize(
    ("hooks", "hook_api", "said"),
    [
        ("a", (1, 0), ""),
        ("ab", (1, 1), ""),
        ("ab", (1, 0), "b is new; raise the second number"),
        ("", (2, 0), ""),
        ("", (1, 1), "a cannot be implemented any more; raise the first number"),
    ],
)
def test_changed_hooks_change_the_version_of_hooks(
    hooks: str, hook_api: tuple[int, int], said: str
) -> None:
    old = Api({}, frozenset("a"), (1, 0), "0.1.0")
    found = "".join(hook_problems(old, replace(old, hooks=frozenset(hooks), hook_api=hook_api)))
    assert found.endswith(said)
    assert bool(found) == bool(said)


def test_a_break_is_told_by_its_name_in_the_news() -> None:
    for told in ("`p.C.m`", "`C.m(x)` does", "`m`"):
        assert is_told("p.C.m", f"- {told} is gone")
    assert not is_told("p.C.m", "- m is gone, `C` stays")
    text = "# Changelog\n\n## Unreleased\n\n- `a`\n\n## 0.2.0 - 2026-12-01\n\n- `b`\n"
    assert "`b`" not in news(text, "v0.2.0")
    assert "`b`" in news(text, "abcdef")


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def write(root: Path, source: str, version: str) -> None:
    """A core of the least that the tool asks for, with ``source`` in its front room."""
    files = {
        "docs/reference/api.md": "| `polyshard` | what scripts import |\n",
        "pyproject.toml": '[tool.polyshard]\nnames-since = "HEAD"\n',
        "packages/polyshard/pyproject.toml": '[project]\nname = "polyshard"\n',
        "packages/polyshard/src/polyshard/__init__.py": source,
        "packages/polyshard/src/polyshard/__about__.py": f'__version__ = "{version}"\n',
        "packages/polyshard/src/polyshard/room.py": "def inside(): ...\n",
        "packages/polyshard/src/polyshard/plugins/__init__.py": "",
        "packages/polyshard/src/polyshard/plugins/contract.py": "HOOK_API = (1, 0)\n",
        "packages/polyshard/src/polyshard/plugins/hookspecs.py": "def hook(group): ...\n",
        "CHANGELOG.md": "## Unreleased\n\n## 0.1.0 - 2026-12-01\n\n- `run`\n",
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_a_name_that_a_tag_had(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, SOURCE, "0.1.0")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "release")
    for tag in ("v0.0.9", "v0.1.0", "vnext"):
        git(tmp_path, "tag", tag)
    assert last_release(tmp_path) == "HEAD"  # the release that is being made is not the last one
    git(tmp_path, "commit", "--allow-empty", "-qm", "after")
    assert last_release(tmp_path) == "v0.1.0"
    old = Api.at(tmp_path, "v0.1.0")
    assert old.hooks == {"hook", "hook(group)"}

    def found(source: str, version: str) -> list[str]:
        write(tmp_path, source, version)
        (tmp_path / "packages/polyshard/src/polyshard/room.py").unlink()  # it was not public
        return list(problems(tmp_path, old, Api.of(tmp_path), "v0.1.0"))

    assert found(SOURCE, "0.1.1") == []
    assert found(SOURCE.replace("steps=1", "steps=2, more=3"), "0.1.1") == []
    removed, patch = found(SOURCE.replace(", *, steps=1", ""), "0.1.1")
    assert removed.startswith("polyshard.run: run(steps): Parameter was removed (since v0.1.0)")
    assert patch.startswith("0.1.1 would break 1 names of v0.1.0")
    assert "polyshard.C: is not exported any more" in found(SOURCE.replace("'C', ", ""), "0.2.0")[0]
    assert "Public object was removed" in found(SOURCE.replace("def m", "def n"), "0.2.0")[0]
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n- `run` takes one step.\n\n## 0.1.0\n")
    now = replace(Api.of(tmp_path), version="0.2.0")
    assert [each.partition(":")[0] for each in problems(tmp_path, old, now, "v0.1.0")] == [
        "polyshard.C.m"
    ]


def test_every_public_module_is_read() -> None:
    found = Api.of(ROOT)
    assert list(found.modules) == public_modules(ROOT)
    assert "polyshard_observer(group)" in found.hooks
    assert breaks(found, found) == {}
