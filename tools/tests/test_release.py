"""What stands between a checkout and a release, in a repository made for it; and the workflow."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import addresses
import release

ROOT = Path(__file__).parents[2]
HOME = "https://example.org/polyshard"
CHANGELOG = """# Changelog

## Unreleased

## 0.2.0 - 2026-12-01

### Added

- `run`.

## 0.1.0 - 2026-11-01

- The first.
"""
PROJECT = '[project]\nname = "polyshard"\n\n[tool.hatch.version]\npath = "x"\n'
CITATION = f"""title: polyshard
version: "0.2.0"
date-released: "2026-12-01"
repository-code: {HOME}
"""


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def change(root: Path, file: str, old: str, new: str) -> None:
    path = root / file
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    git(root, "commit", "-qam", "change")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository that may be released."""
    core = tmp_path / "packages" / "polyshard"
    (core / "src" / "polyshard").mkdir(parents=True)
    (core / "src" / "polyshard" / "__about__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "pyproject.toml").write_text(f'[tool.polyshard]\nrepository = "{HOME}/"\n')
    (core / "pyproject.toml").write_text(addresses.with_urls(PROJECT, addresses.urls(tmp_path)))
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "CITATION.cff").write_text(CITATION)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "release")
    return tmp_path


def test_a_sound_repository_may_be_released(root: Path) -> None:
    assert release.problems(root, is_tagged=False) == []
    git(root, "tag", "v0.2.0")
    assert release.problems(root, is_tagged=True) == []


def test_a_tag_and_a_file_that_stand_in_the_way(root: Path) -> None:
    git(root, "tag", "v0.3.0")
    (problem,) = release.problems(root, is_tagged=True)
    assert problem == "HEAD has no tag v0.2.0, but v0.3.0: the tag is the version"
    git(root, "tag", "v0.2.0")
    (root / "new.py").touch()
    files, released = release.problems(root, is_tagged=False)
    assert files == "1 files are not committed, the first: new.py"
    assert released.startswith("v0.2.0 is released already")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n- more\n", "move what is under"),
        ("CHANGELOG.md", "## Unreleased\n\n", "", "the first section must be '## Unreleased'"),
        ("CHANGELOG.md", "0.2.0 - 2026-12-01", "0.2.0", "must be '## 0.2.0 - YYYY-MM-DD'"),
        ("CHANGELOG.md", "0.2.0 - 2026", "0.3.0 - 2026", "must be '## 0.2.0 - YYYY-MM-DD'"),
        ("CHANGELOG.md", "### Added\n\n- `run`.\n", "", "the section of 0.2.0 is empty"),
        ("CITATION.cff", '"0.2.0"', '"0.1.0"', 'version must be "0.2.0", is 0.1.0'),
        ("CITATION.cff", 'date-released: "2026-12-01"\n', "", 'must be "2026-12-01", is missing'),
        ("pyproject.toml", HOME, "https://example.org/other", "[project.urls] is old"),
        ("pyproject.toml", f"{HOME}/", "", "repository is empty"),
    ],
)
def test_what_was_forgotten_is_named(root: Path, file: str, old: str, new: str, said: str) -> None:
    change(root, file, old, new)
    assert any(said in problem for problem in release.problems(root, is_tagged=False))


def test_every_distribution_says_the_same_addresses(root: Path) -> None:
    project = root / "packages" / "polyshard" / "pyproject.toml"
    text = project.read_text("utf-8")
    assert f'Issues = "{HOME}/issues"' in text
    assert addresses.with_urls(text, addresses.urls(root)) == text
    change(root, "pyproject.toml", HOME, "https://example.org/moved")
    moved = addresses.with_urls(text, addresses.urls(root))
    assert moved == text.replace(HOME, "https://example.org/moved")
    change(root, "pyproject.toml", "https://example.org/moved/", "")
    assert addresses.with_urls(text, addresses.urls(root)) == PROJECT
    assert addresses.outdated(ROOT) == []


# The workflow --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def runs(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def uses(job: dict[str, Any], action: str) -> list[dict[str, Any]]:
    return [step for step in job["steps"] if step.get("uses", "").startswith(f"{action}@")]


def test_steps_follow_each_other(workflow: dict[str, Any]) -> None:
    needs = {name: job.get("needs") for name, job in workflow["jobs"].items()}
    assert needs == {
        "build": None,
        "try": "build",
        "rehearse": "try",
        "publish": "rehearse",
        "record": "publish",
    }


def test_wheels_are_built_once_and_promoted(workflow: dict[str, Any]) -> None:
    jobs = workflow["jobs"]
    building = [name for name, job in jobs.items() if "nox -s release -- --tagged" in runs(job)]
    assert building == ["build"]
    assert [step["with"]["name"] for step in uses(jobs["build"], "actions/upload-artifact")] == [
        "dist",
        "notes",
    ]
    for name in ("rehearse", "publish"):
        (got,) = uses(jobs[name], "actions/download-artifact")
        assert got["with"] == {"name": "dist", "path": "dist/"}
        assert not runs(jobs[name])  # nothing is made or changed on the way


def test_what_publishes_has_an_identity_that_nothing_else_has(workflow: dict[str, Any]) -> None:
    """That actions are pinned and no password is stored, zizmor sees (`nox -s lint`)."""
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {}
    trusted = [name for name, job in jobs.items() if "id-token" in job["permissions"]]
    assert {name: jobs[name]["environment"] for name in trusted} == {
        "rehearse": "testpypi",
        "publish": "pypi",
    }
    for name in trusted:
        (publish,) = uses(jobs[name], "pypa/gh-action-pypi-publish")
        assert publish["with"]["attestations"] is True
        assert jobs[name]["permissions"] == {"id-token": "write"}


def test_actions_say_which_version_their_commit_is() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    lines = [line for line in text.splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.search(r"uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_only_tags_of_versions_start_it(workflow: dict[str, Any]) -> None:
    known = {"name", "permissions", "concurrency", "jobs"}
    (on,) = (value for key, value in workflow.items() if key not in known)  # YAML 1.1: on is True
    assert on == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_have_questions(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text("utf-8")
    questions = yaml.safe_load(text)["body"]
    identities = [question["id"] for question in questions]
    assert len(set(identities)) == len(identities) >= 3
    assert any(question.get("validations", {}).get("required") for question in questions)


def test_the_citation_is_of_this_version() -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert found["version"] == release.version_of(ROOT)
    assert importlib.import_module("polyshard.__about__").__version__ == found["version"]
