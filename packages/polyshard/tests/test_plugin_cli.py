"""``polyshard plugins list`` and ``doctor``."""

from __future__ import annotations

import importlib.metadata
import json
from importlib.metadata import EntryPoint

import pytest
from torch import nn
from toy_plugins import Codecs, Preparing
from typer.testing import CliRunner

from polyshard import discovery
from polyshard.cli import app
from polyshard.stack import build_stack


def install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    points = tuple(EntryPoint(name, value, discovery.ENTRY_POINTS) for name, value in entries)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **kwargs: points)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app(), ["plugins", *arguments])
    return result.exit_code, result.output


def test_list(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert "no plugins are installed" in run("list")[1]
    install(monkeypatch, ("codecs", "toy_plugins:Codecs"))
    code, text = run("list", "--json")
    assert code == 0
    (found,) = json.loads(text)
    assert found["name"] == "codecs"
    assert found["version"] == "1.2"
    assert found["hooks"] == ["polyshard_gather_codec", "polyshard_reduce_codec"]
    assert found["problems"] == []


def test_a_healthy_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("codecs", "toy_plugins:Codecs"))
    code, text = run("doctor")
    assert code == 0
    assert "✔ codecs" in text


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([("gone", "no_such_module:x")], "ModuleNotFoundError"),
        ([("a", "toy_plugins:Codecs")], "contract 'codecs'"),
        ([("codecs", "toy_plugins:Codecs")] * 2, "several distributions"),
        ([("mistaken", "test_stack:Mistaken")], "did you mean 'polyshard_reduce_codec'?"),
        ([("needing", "test_plugin_cli:Needing")], "requires 'absent'"),
        ([("future", "test_plugin_cli:Future")], "hook API 2.0"),
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


def test_tracing_shows_each_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYSHARD_TRACE", "1")
    build_stack([Preparing()]).prepare(nn.Linear(1, 1), None)  # type: ignore[arg-type]
    assert "polyshard: polyshard_prepare_model 'preparing' (0) 0." in capsys.readouterr().err


class Needing(Codecs):
    name = "needing"
    requires = ("absent",)


class Future(Codecs):
    name = "future"
    hook_api = (2, 0)
