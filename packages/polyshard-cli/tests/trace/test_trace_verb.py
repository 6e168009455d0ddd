"""The command line: tables, JSON, and one message for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyshard_cli.trace.command import app
from polyshard_cli.trace.events import Kind, Span, process_lines
from polyshard_cli.trace.recording.lines import LineFile, path_of

LONG = "model.decoder.layers.11.mixture_of_experts"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head = {"polyshard_trace": 1, "rank": 0, "world_size": 1, "host": "h" * 60}
    head |= {"opened_ns": 0, "opened_wall_ns": 0}
    file = LineFile(path_of(tmp_path, 0), head, process_lines(0, "h"))
    args = {"bytes": 123456789, "wait_us": 12345678.9, "group": LONG}
    for index in range(50):
        name = f"{LONG}{index}"
        file.add([Span(Kind.GATHER, name, 0, 98765432100, 0, args).line(0)])
    file.add([Span(Kind.STEP, "step 0", 0, 98765432100).line(0)])
    file.close()
    return tmp_path


def test_tables_fit_80_columns(folder: Path) -> None:
    for arguments in (("show", str(folder)), ("merge", str(folder))):
        code, text = run(*arguments)
        assert code == 0
        table = [line for line in text.splitlines() if str(folder) not in line]
        assert max(map(len, table)) <= 80, text
    _, text = run("show", str(folder))
    assert "and 10 more" in text
    assert "117.7 MiB" in text
    assert "more" not in run("show", str(folder), "--rows", "60")[1]


def test_json_is_for_programs(folder: Path) -> None:
    _, text = run("show", str(folder), "--json")
    found = json.loads(text)
    assert (found["steps"], found["ranks"], len(found["rows"])) == (1, 1, 50)
    assert found["kinds"][0]["bytes_per_second"] == pytest.approx(123456789 / 98.7654321)
    out = folder / "all.json"
    _, text = run("merge", str(folder), "-o", str(out), "--json")
    assert json.loads(text)["path"] == str(out)
    assert len(json.loads(out.read_text())["traceEvents"]) == 53


def test_mistakes_are_one_message(tmp_path: Path) -> None:
    for verb in ("merge", "show"):
        code, text = run(verb, str(tmp_path / "nowhere"))
        assert code == 2
        assert text.startswith(f"error: {tmp_path / 'nowhere'} has no rank0.json")
        assert len(text.splitlines()) == 1
