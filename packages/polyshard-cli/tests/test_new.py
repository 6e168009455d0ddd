"""``polyshard plugins new``: what it writes, and what it refuses before anything is written."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from toy_entry_points import install
from typer.testing import CliRunner

from polyshard_cli import scaffold
from polyshard_cli.main import app


def new(*arguments: str, answers: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app(), ["plugins", "new", *arguments], input=answers)
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("seam", scaffold.seams())
def test_every_seam_is_a_distribution_of_that_name(tmp_path: Path, seam: str) -> None:
    code, text = new("quokka_7", "--seam", seam, "--author", "Ada Okapi")
    assert code == 0, text
    assert "written: polyshard-quokka-7, 6 files; users pass plugins=['quokka_7']" in text
    folder = tmp_path / "polyshard-quokka-7"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "polyshard-quokka-7"
    entry = project["entry-points"]["polyshard.plugins"]
    assert entry == {"quokka_7": "polyshard_quokka_7:Quokka7"}
    assert "Ada Okapi" in (folder / "LICENSE").read_text()
    # What the tests of the plugin ask for: a class that can be made, and answers to its name.
    spec = importlib.util.spec_from_file_location(
        "rendered", folder / "src/polyshard_quokka_7/__init__.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rendered"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["rendered"]
    assert module.Quokka7().polyshard_contract.name == "quokka_7"
    compile((folder / "tests/test_plugin.py").read_text(), "test_plugin.py", "exec")


def test_it_asks_for_what_is_not_given(tmp_path: Path) -> None:
    code, text = new(answers="quokka\n\n")
    assert code == 0, text
    assert "  storage: a plugin that" in text
    source = tmp_path / "polyshard-quokka/src/polyshard_quokka/__init__.py"
    assert "ObserverPlugin" in source.read_text()


def test_the_observer_counts_under_any_name(tmp_path: Path) -> None:
    assert new("counter", "--seam", "observer", "--folder", "made")[0] == 0
    names: dict[str, Any] = {}
    exec((tmp_path / "made/src/polyshard_counter/__init__.py").read_text(), names)
    names["Counter"]().on_unshard("a group", 3)


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert new("quokka", "--seam", "storage", "--folder", "mine")[0] == 0
    assert (tmp_path / "mine" / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Byte-Counter"], "such as 'byte_counter'; did you mean 'byte_counter'?"),
        (["ByteCounter"], "did you mean 'byte_counter'?"),
        (["byte__counter"], "cannot be called 'byte__counter'"),
        (["7up"], "cannot be called '7up'"),
        (["größe"], "cannot be called 'größe'"),
        (["class"], "no keyword of Python"),
        (["none"], "no keyword of Python"),
        (["sequence"], "its class would be called Sequence, as something that plugins import"),
        (["codecs"], "already installed (by ?)"),
        (["quokka", "--seam", "observr"], "no seam called 'observr'; did you mean 'observer'?"),
        (["quokka", "--seam", "nothing"], "storage: "),
        (["quokka", "--folder", "file"], "file is a file"),
        (["quokka", "--folder", "full"], "full is not empty"),
    ],
)
def test_mistakes_are_one_message_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], said: str
) -> None:
    install(monkeypatch, ("codecs", "toy_codecs:Codecs"))
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    given = arguments if "--seam" in arguments else [*arguments, "--seam", "observer"]
    before = sorted(tmp_path.rglob("*"))
    code, text = new(*given)
    assert code == 2, text
    assert text.startswith("error: ")
    assert said in text
    assert sorted(tmp_path.rglob("*")) == before


def test_a_package_that_is_here_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "polyshard_quokka.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    code, text = new("quokka", "--seam", "observer")
    assert code == 2
    assert "imported as polyshard_quokka, which exists already" in text
