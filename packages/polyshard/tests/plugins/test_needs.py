"""What plugins need of each other and of polyshard: bounds, circles, slips, hidden marks."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from toy_entry_points import only
from typer.testing import CliRunner

from polyshard import Contract, Plugin, hookimpl
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins import discovery
from polyshard.plugins.contract import circle_of, problems_between
from polyshard.plugins.discovery import load_plugin
from polyshard.plugins.stack import build_stack
from polyshard.plugins.validation import problems_of
from polyshard_cli.main import app

OBS = Contract("obs", version="2.1", provides=frozenset({"observing"}))


def needing(*requires: str) -> Contract:
    return Contract("needy", requires=frozenset(requires))


@pytest.mark.parametrize(
    "need", ["obs", "observing", "obs>=2", "obs >=2,<3", "obs~=2.0", "obs==2.1"]
)
def test_met(need: str) -> None:
    assert list(problems_between([needing(need), OBS])) == []


@pytest.mark.parametrize(
    ("need", "words"),
    [
        ("obs>=3", "plugin 'needy' requires 'obs>=3', but 'obs' is 2.1 (present: needy, obs"),
        ("sbo>=3", "requires 'sbo>=3', which no plugin of the stack is or provides"),
        ("observing>=1", "'observing' is a capability of 'obs', and capabilities have no versions"),
    ],
)
def test_unmet(need: str, words: str) -> None:
    (problem,) = problems_between([needing(need), OBS])
    assert words in str(problem)


def test_bounds_that_are_none_are_refused() -> None:
    with pytest.raises(PluginError, match="'needy': requires has 'obs=>2', which is no name with"):
        needing("obs=>2")
    with pytest.raises(PluginError, match="no name stands before the bounds"):
        needing(">=2")


def test_what_is_no_name_or_version_is_refused() -> None:
    with pytest.raises(PluginError, match=r"'obs': its version must be one such as '1\.2', got"):
        Contract("obs", version="latest and greatest")
    for name in ("", " "):
        with pytest.raises(PluginError, match="a plugin's name must be a text that is not empty"):
            Contract(name)

    class Nameless(Plugin):
        name = ""

    with pytest.raises(PluginError, match="a plugin's name must be a text that is not empty"):
        build_stack([Nameless()])


@pytest.mark.parametrize("relation", ["provides", "conflicts_with", "before", "after"])
def test_only_requirements_have_bounds(relation: str) -> None:
    relations: dict[str, Any] = {relation: frozenset({"obs>=2"})}
    with pytest.raises(PluginError, match=rf"plugin 'p': {relation} takes names without version"):
        Contract("p", **relations)


def test_a_circle_is_named_in_order() -> None:
    one = Contract("one", before=frozenset({"two"}))
    two = Contract("two", before=frozenset({"three"}))
    three = Contract("three", before=frozenset({"one"}))
    circle = circle_of([one, two, three])
    assert circle[0] == circle[-1]
    steps = set(pairwise(circle))
    assert steps == {("one", "two"), ("two", "three"), ("three", "one")}
    assert circle_of([one, two]) == []
    (problem,) = problems_between([one, two, three])
    assert isinstance(problem, ConflictError)
    assert re.search(r"cannot be ordered: .* before ", str(problem))


# What is installed -------------------------------------------------------------------------------


class Watching(Plugin):
    @hookimpl
    def polyshard_observer(self, group: object) -> None:
        del group


class First(Watching):
    name = "first"
    before = ("second",)


class Second(Watching):
    name = "second"
    before = ("first",)


class Slip(Watching):
    name = "slip"
    after = ("secund", "somebody elses")


def doctor(monkeypatch: pytest.MonkeyPatch, *names: str) -> str:
    points = tuple(
        EntryPoint(name, f"{__name__}:{name.title()}", discovery.ENTRY_POINTS) for name in names
    )
    only(monkeypatch, points)
    result = CliRunner().invoke(app(), ["plugins", "doctor"])
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


def test_doctor_sees_circles(monkeypatch: pytest.MonkeyPatch) -> None:
    text = doctor(monkeypatch, "first", "second", "slip")
    assert (
        text.count("cannot be ordered: first before second before first")
        + text.count("cannot be ordered: second before first before second")
        == 2
    )
    assert "✘ slip" in text


def test_doctor_sees_slips_and_leaves_strangers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = doctor(monkeypatch, "second", "slip")
    assert "after names 'secund', which is not installed; did you mean 'second'?" in text
    assert "somebody" not in text
    assert "✔ second" in text


def test_a_plugin_for_another_polyshard_is_not_loaded_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "acme-1.0.dist-info"
    folder.mkdir()
    metadata = "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\nRequires-Dist: polyshard>=900\n"
    (folder / "METADATA").write_text(metadata)
    (folder / "entry_points.txt").write_text(f"[{discovery.ENTRY_POINTS}]\nnew = acme_new\n")
    (tmp_path / "acme_new.py").write_text("raise RuntimeError('imported')\n")
    with pytest.raises(PluginError, match=r"'new': acme 1\.0 needs polyshard>=900, this is polysh"):
        load_plugin("new")
    with pytest.raises(PluginError, match="needs polyshard>=900"):
        build_stack(["new"])


# Marks -------------------------------------------------------------------------------------------


class Above(Plugin):
    @staticmethod
    @hookimpl
    def polyshard_observer(group: object) -> None:
        del group


class Below(Plugin):
    @hookimpl
    @staticmethod
    def polyshard_observer(group: object) -> None:
        del group


class Named(Plugin):
    @hookimpl(specname="polyshard_observer")
    @classmethod
    def watch(cls, group: object) -> None:
        del group


def test_static_hooks_are_called_or_say_how() -> None:
    assert problems_of(Above()) == []
    for hidden, name in ((Below(), "polyshard_observer"), (Named(), "watch")):
        (problem,) = problems_of(hidden)
        assert problem.startswith(f"'{name}' hides its mark")
        assert "@staticmethod and @classmethod above @polyshard.hookimpl" in problem
