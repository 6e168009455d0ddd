"""``polyshard plugins list`` and ``doctor``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from torch import nn
from toy_entry_points import distribution, install, install_from
from toy_planning import Preparing
from typer.testing import CliRunner

from polyshard.installed import installed_plugins
from polyshard.plugins.stack import build_stack
from polyshard_cli.main import app
from polyshard_cli.plugins import Loaded


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app(), ["plugins", *arguments])
    return result.exit_code, result.output


def test_list(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert "no plugins are installed" in run("list")[1]
    install(monkeypatch, ("codecs", "toy_codecs:Codecs"))
    code, text = run("list", "--json")
    assert code == 0
    (found,) = json.loads(text)
    assert found["name"] == "codecs"
    assert found["version"] == "1.2"
    assert found["hooks"] == ["polyshard_gather_codec", "polyshard_reduce_codec"]
    assert found["problems"] == []


def test_a_healthy_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("codecs", "toy_codecs:Codecs"))
    code, text = run("doctor")
    assert code == 0
    assert "✔ codecs" in text


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([("gone", "no_such_module:x")], "ModuleNotFoundError"),
        ([("a", "toy_codecs:Codecs")], "contract 'codecs'"),
        ([("codecs", "toy_codecs:Codecs")] * 2, "several distributions"),
        ([("mistaken", "toy_mistakes:Mistaken")], "did you mean 'polyshard_reduce_codec'?"),
        ([("needing", "toy_mistakes:Needing")], "requires 'absent'"),
        ([("future", "toy_mistakes:Future")], "hook API 2.0"),
    ],
    ids=["import", "name", "duplicate", "hook", "requires", "api"],
)
def test_doctor_gives_reasons(
    monkeypatch: pytest.MonkeyPatch, entries: list[tuple[str, str]], reason: str
) -> None:
    install(monkeypatch, *entries)
    code, text = run("doctor")
    assert code == 1
    assert reason in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("polyshard>=900", "acme 1.0 needs polyshard>=900, this is polyshard"),
        ("Poly_Shard>=900", None),
        ("polyshard>=0.0.1", None),
        ("polyshard>=900; python_version < '3'", None),
        ("polyshard>=900; extra == 'next'", None),
        ("polyshard >>> 1", "acme 1.0 has a requirement that cannot be read"),
    ],
    ids=["above", "another", "within", "platform", "extra", "unreadable"],
)
def test_doctor_reads_version_bounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, requirement: str, reason: str | None
) -> None:
    distribution(tmp_path, "acme", "codecs = toy_codecs:Codecs", requirement)
    install_from(monkeypatch, tmp_path)
    code, text = run("doctor")
    assert code == (1 if reason else 0), text
    assert (reason or "✔ codecs (acme 1.0)") in text.replace("\n", " ")


def test_doctor_names_all_owners_of_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("acme", "emca"):
        distribution(tmp_path, name, "codecs = toy_codecs:Codecs")
    install_from(monkeypatch, tmp_path)
    code, text = run("doctor")
    assert code == 1
    assert "plugin named 'codecs': acme 1.0, emca 1.0" in text.replace("\n", " ")


def test_a_requirement_may_be_a_capability_of_another_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needing, providing = ("needing", "toy_mistakes:Needing"), ("able", "toy_mistakes:Able")
    install(monkeypatch, needing, providing)
    assert run("doctor")[0] == 0


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("toy_mistakes:Declaring", "its polyshard_contract is a dict"),
        ("toy_mistakes:Spelt", "did you mean 'group'?"),
        ("toy_mistakes:nothing", "a factory must return the plugin"),
    ],
    ids=["contract", "argument", "none"],
)
def test_doctor_survives_odd_plugins(
    monkeypatch: pytest.MonkeyPatch, entry: str, reason: str
) -> None:
    install(monkeypatch, ("odd", entry))
    code, text = run("doctor")
    assert code == 1
    assert reason in text.replace("\n", " ")


LEAVING = {
    "module": "import sys; sys.exit('no licence found')",
    "factory": "def make(): raise SystemExit(3)",
    "base": "class Gone(BaseException): pass\nraise Gone('no licence found')",
    "contract": """
class Shy:
    @property
    def polyshard_contract(self):
        raise SystemExit('no licence found')
make = Shy()
""",
    "attribute": """
from polyshard import Contract
class Shy:
    polyshard_contract = Contract('leaving')
    def __dir__(self):
        raise SystemExit('no licence found')
make = Shy()
""",
}


@pytest.mark.parametrize("kind", LEAVING)
@pytest.mark.parametrize("command", ["list", "doctor"])
def test_a_module_that_leaves_silences_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, command: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"leaving_{kind}.py").write_text(LEAVING[kind])
    entry = ("leaving", f"leaving_{kind}" + ("" if kind in ("module", "base") else ":make"))
    install(monkeypatch, entry, ("codecs", "toy_codecs:Codecs"))
    code, text = run(command)
    assert code == (command == "doctor")
    if command == "list":
        assert re.search(r"leaving .* has problems, see doctor", text)
        assert "polyshard_gather_codec, polyshard_reduce_codec" in text
    else:
        assert re.search(r"✘ leaving .*(SystemExit|Gone): (no licence found|3)", text)
        assert "✔ codecs" in text


def test_an_interrupt_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_module.py").write_text("raise KeyboardInterrupt")
    install(monkeypatch, ("slow", "slow_module"))
    with pytest.raises(KeyboardInterrupt):
        Loaded.of(installed_plugins()[0])


def test_tracing_shows_each_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYSHARD_TRACE", "1")
    build_stack([Preparing()]).prepare(nn.Linear(1, 1), None)  # type: ignore[arg-type]
    assert "polyshard: polyshard_prepare_model 'preparing' (0) 0." in capsys.readouterr().err
