"""The command line of the demo."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyshard_cli import main as cli
from polyshard_demo.settings import AUTO, Settings


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app(), list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_help_names_every_option() -> None:
    code, text = run("train", "--help")
    assert code == 0
    options = "text ranks engine preset steps batch sequence lr seed bf16 accumulate tied resume"
    newer = "reproducible record dropout page no-page machine"
    for option in [
        *options.split(),
        *newer.split(),
        "out",
        "checkpoint-every",
        "eval-every",
        "device",
        "plugins",
    ]:
        assert f"--{option}" in text


def test_wrong_settings_are_one_line_and_exit_2(tmp_path: Path) -> None:
    code, text = run("train", "--text", str(tmp_path / "nowhere"), "--out", str(tmp_path))
    assert code == 2
    assert text.splitlines() == [
        f"error: --text {tmp_path / 'nowhere'} does not exist; give a text file or a directory"
    ]


def test_options_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr("polyshard_demo.command.launch", seen.append)
    code, _ = run("train", "--plugins", "offload, quantized", "--tied", "--resume", "runs/a")
    assert code == 0
    run("train", "--engine", "single", "--resume", "runs/b/checkpoints/step-000003")
    run("train")
    run("train", "--resume", "auto", "--out", "runs/c")
    assert seen[0].plugin_names == ("offload", "quantized")
    assert (seen[0].tied, seen[0].ranks, seen[0].out) == (True, 2, Path("runs/a"))
    assert (seen[1].ranks, seen[1].out) == (1, Path("runs/b"))
    assert seen[2].out.parent == Path("runs")
    assert Settings(out=seen[2].out) == seen[2]
    assert (seen[3].out, seen[3].resume) == (Path("runs/c"), AUTO)
    run("train", "--dropout", "0.5")
    assert seen[4].dropout == 0.5
    code, text = run("train", "--resume", "auto")
    assert code == 2
    assert "give it as --out" in text
