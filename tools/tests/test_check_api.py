"""What breaks callers, by hand; and the comparison with a tag, in repositories made for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("griffe")
from api_changes import Break, breaks, hook_problems
from check_api import BASELINE, api_at, last_tag, news, problems, untold
from public_api import Entry, PublicApi, public_api


def api(
    *parameters: str, kind: str = "function", hooks: str = "a", hook_api: tuple[int, int] = (1, 0)
) -> PublicApi:
    entry = Entry(kind, (), parameters)
    return PublicApi({"p.f": entry}, {"polyshard_hook": tuple(hooks)}, hook_api)


FINE = [
    ([], ["either x="]),
    ([], ["keyword x="]),
    ([], ["* args", "** kwargs"]),
    (["either x"], ["either x="]),
    (["keyword x"], ["either x"]),
    (["keyword x", "keyword y"], ["keyword y", "keyword x"]),
    (["either x", "keyword y="], ["either x", "either z=", "keyword y="]),
    (["keyword x="], ["** settings"]),
]
BROKEN = [
    (["either x"], [], "takes no x any more"),
    (["either x"], ["either y"], "takes no x any more"),
    ([], ["either x"], "needs x"),
    ([], ["keyword x"], "needs x"),
    (["either x="], ["either x"], "x has no default any more"),
    (["either x"], ["keyword x"], "x is taken by keyword only"),
    (["either x"], ["position x"], "x is taken by position only"),
    (["either x", "either y"], ["either y", "either x"], "x moved from place 1 to 2"),
    (["either x"], ["either y=", "either x"], "x moved from place 1 to 2"),
]


@pytest.mark.parametrize(("old", "new"), FINE)
def test_what_callers_do_not_notice(old: list[str], new: list[str]) -> None:
    assert breaks(api(*old), api(*new)) == []


@pytest.mark.parametrize(("old", "new", "how"), BROKEN)
def test_what_breaks_callers(old: list[str], new: list[str], how: str) -> None:
    assert Break("p.f", how) in breaks(api(*old), api(*new))


def test_names_that_go_or_become_something_else() -> None:
    names = {"p.C": Entry("class", ("Base",)), "p.C.m": Entry("function"), "p.f": Entry("function")}
    old = PublicApi(names, {}, (1, 0))
    new = PublicApi({"p.f": Entry("attribute")}, {}, (1, 0))
    assert [str(one) for one in breaks(old, new)] == [
        "p.C: is gone",
        "p.f: was a function, is a attribute",
    ]
    smaller = PublicApi({"p.C": Entry("class"), "p.f": Entry("function")}, {}, (1, 0))
    assert [str(one) for one in breaks(old, smaller)] == [
        "p.C: is no Base any more",
        "p.C.m: is gone",
    ]


@pytest.mark.parametrize(
    ("hooks", "hook_api", "said"),
    [
        ("a", (1, 0), ""),
        ("ab", (1, 1), ""),
        ("ab", (1, 0), "polyshard_hook(b) is new; raise the second number"),
        ("", (2, 0), ""),
        ("", (1, 1), "polyshard_hook(a) cannot be implemented any more; raise the first number"),
    ],
)
def test_changed_hooks_change_the_version_of_hooks(
    hooks: str, hook_api: tuple[int, int], said: str
) -> None:
    assert "".join(hook_problems(api(), api(hooks=hooks, hook_api=hook_api))).endswith(said)
    assert bool(hook_problems(api(), api(hooks=hooks, hook_api=hook_api))) == bool(said)


@pytest.mark.parametrize("told", ["`p.C.m`", "`C.m(x)` does", "`m`"])
def test_a_break_is_told_by_its_name(told: str) -> None:
    gone = Break("p.C.m", "is gone")
    assert untold([gone], f"- {told} is gone") == []
    assert untold([gone], "- m is gone, `C` stays") == [gone]


def test_news_end_where_the_last_release_begins() -> None:
    text = "# Changelog\n\n## Unreleased\n\n- `a`\n\n## 0.2.0 - 2026-12-01\n\n- `b`\n"
    assert "`b`" not in news(text, "v0.2.0")
    assert "`a`" in news(text, "v0.2.0")
    assert "`b`" in news(text, None)


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def write(root: Path, source: str, version: str) -> None:
    """A core of the least that the tool asks for, with ``source`` in its front room."""
    package = root / "packages" / "polyshard" / "src" / "polyshard"
    for module in ("checkpoint", "errors", "fsdp1", "guards", "safetensors", "seams", "transport"):
        (package / f"{module}.py").parent.mkdir(parents=True, exist_ok=True)
        (package / f"{module}.py").write_text("__all__ = []\n")
    for folder in ("plugins", "testing/streams"):
        (package / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("plugins", "testing", "testing/streams"):
        (package / folder / "__init__.py").write_text("__all__ = []\n")
    (package / "plugins" / "contract.py").write_text("HOOK_API = (1, 0)\n")
    (package / "plugins" / "hookspecs.py").write_text("def polyshard_hook(group): ...\n")
    (package / "__init__.py").write_text(source)
    (package / "__about__.py").write_text(f'__version__ = "{version}"\n')
    (root / "packages/polyshard/pyproject.toml").write_text('[project]\nname = "polyshard"\n')
    (root / "CHANGELOG.md").write_text("## Unreleased\n\n## 0.1.0 - 2026-12-01\n\n- `run`\n")


def test_a_name_that_a_tag_had(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, "__all__ = ['run']\ndef run(model, *, steps=1): ...\n", "0.1.0")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "release")
    assert last_tag(tmp_path) is None
    for tag in ("v0.0.9", "v0.1.0", "vnext"):
        git(tmp_path, "tag", tag)
    assert last_tag(tmp_path) is None  # the release that is being made is not the last one
    git(tmp_path, "commit", "--allow-empty", "-qm", "after")
    assert last_tag(tmp_path) == "v0.1.0"
    old = api_at(tmp_path, "v0.1.0")
    assert old.names["polyshard.run"].parameters == ("either model", "keyword steps=")
    assert PublicApi.from_json(old.to_json()) == old
    assert problems(tmp_path, old, public_api(tmp_path), "v0.1.0") == []
    write(tmp_path, "__all__ = ['run']\ndef run(model): ...\n", "0.1.1")
    found = problems(tmp_path, old, public_api(tmp_path), "v0.1.0")
    assert found[0].startswith("polyshard.run: takes no steps any more (since v0.1.0): name it")
    assert found[1].startswith("0.1.1 would break 1 names of v0.1.0")
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n- `run` takes one step.\n\n## 0.1.0\n")
    write_version = tmp_path / "packages/polyshard/src/polyshard/__about__.py"
    write_version.write_text('__version__ = "0.2.0"\n')
    assert problems(tmp_path, old, public_api(tmp_path), "v0.1.0") == []


def test_what_is_committed_can_be_read() -> None:
    kept = PublicApi.from_json(BASELINE.read_text("utf-8"))
    assert "polyshard.fully_shard" in kept.names
    assert "polyshard_offload.Offload" in kept.names
    assert kept.hooks["polyshard_observer"] == ("group",)
