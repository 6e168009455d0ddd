"""The command line: a table, JSON, exit codes, and one message for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from compare_found import found
from typer.testing import CliRunner

from polyshard_cli.compare import comparing
from polyshard_cli.compare.command import compare

QUICK = ("--steps", "2", "--warmup", "0", "--device", "cpu", "--timeout", "120")
ROOT = Path(__file__).parents[4]


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command("compare")(compare)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_run_prints_a_table_and_writes_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ("--json", str(tmp_path / "found.json"), "--picture", str(tmp_path / "found.png"))
    code, text = run("compare_jobs:linear", "--engines", "polyshard,single", *QUICK, *files)
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    assert "4,096 parameters in 1 units" in text
    written = json.loads((tmp_path / "found.json").read_text())
    assert [result["name"] for result in written["results"]] == ["polyshard", "single"]
    assert len(written["results"][0]["losses"]["steps"]) == 2
    assert (tmp_path / "found.png").stat().st_size > 10_000


def test_json_alone_goes_to_the_terminal_and_a_failure_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "compare", lambda *_: found())
    code, text = run("--json", "-")
    assert code == 1
    assert json.loads(text)["results"][-1]["error"]["rank"] == 1


def test_what_a_job_prints_when_imported_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('loading')\nfrom compare_jobs import linear as build\n")
    job = f"{tmp_path / 'job.py'}"
    app = typer.Typer()
    app.command("compare")(compare)
    arguments = [job, "--engines", "single", *QUICK, "--json", "-"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert json.loads(result.stdout)["results"][0]["name"] == "single", result.output


def test_files_are_looked_at_before_minutes_are_spent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(comparing, "compare", lambda *_: pytest.fail("measured"))
    code, text = run("--json", str(tmp_path))
    assert code == 2
    assert "it is a folder; name a file" in " ".join(text.split())


def test_every_key_is_documented() -> None:
    known = (ROOT / "docs" / "reference" / "compare.md").read_text("utf-8")
    missing = [
        key for key in sorted(keys(json.loads(found().to_json()))) if f"`{key}`" not in known
    ]
    assert not missing


def keys(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys, value)) if value else set()
    return set(value).union(*map(keys, value.values())) if isinstance(value, dict) else set()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.py"], "there is no such file"),
        (["compare_jobs:raising", "--engines", "single"], "the script's own trouble"),
        (["--engines", "fsdp3"], "did you mean fsdp2?"),
        (["--engines", ","], "--engines is empty; try polyshard,fsdp2,ddp,single"),
        (["--engines", "polyshard+nobody"], "no installed plugin is named 'nobody'"),
        (["--ranks", "0"], "--ranks 0: give at least 1"),
        (["--warmup", "-1"], "--warmup -1: give 0 or more"),
        (["--ranks", "500", "--device", "cuda"], "need a CUDA device each"),
        (["--json", "nowhere/found.json"], "there is no folder nowhere; make it first"),
        (["--picture", "found.gif"], "ends in .png, .svg or .pdf"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_mistakes_are_one_message(arguments: list[str], expected: str) -> None:
    pytest.importorskip("matplotlib")
    code, text = run(*arguments)
    said = " ".join(text.split())
    assert (code, said.count("error:")) == (2, 1), text
    assert expected in said


def test_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, text = run("compare_jobs:linear")
    assert (code, "start it once, without torchrun" in " ".join(text.split())) == (2, True)
