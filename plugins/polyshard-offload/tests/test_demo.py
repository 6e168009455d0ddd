"""The demo trains with offload as it continues from a checkpoint without."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("polyshard_demo")
from polyshard_cli.main import app

OPTIONS = ["train", "--preset", "tiny", "--ranks", "2", "--no-page"]


def command(*arguments: str) -> int | str | None:
    """What the command exits with; ranks are processes of their own, the launcher is this one."""
    with pytest.raises(SystemExit) as done:
        app()([*OPTIONS, *arguments], prog_name="polyshard")
    return done.value.code


def losses(out: Path, *arguments: str) -> list[float]:
    assert command("--out", str(out), *arguments) == 0
    report = json.loads((out / "report.json").read_text())
    return [step["loss"] for step in report["steps"]]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_demo_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    offload = f"optimizer=disk,params=host,fraction=0.7,path={scratch}"
    found = losses(
        tmp_path / "away", "--steps", "4", "--checkpoint-every", "2", "--offload", offload
    )
    checkpoint = tmp_path / "away" / "checkpoints" / "step-000002"
    again = losses(tmp_path / "again", "--steps", "4", "--resume", str(checkpoint))
    assert len(found) == 4
    assert again == found
    assert list(scratch.iterdir()) == []
    assert "RANK" not in os.environ


def test_the_demo_passes_refusals_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--out", str(tmp_path / "run"), "--offload", "grads=disk") == 2
    assert "choose params='host' or 'disk'" in " ".join(capsys.readouterr().err.split())
