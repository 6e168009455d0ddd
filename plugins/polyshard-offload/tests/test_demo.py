"""The demo trains the same with offload, and goes on from its checkpoints without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the demo needs polyshard[demo]")
pytest.importorskip("matplotlib", reason="the demo needs polyshard[demo]")
RUN = "from polyshard.cli import main; main()"
COMMAND = [sys.executable, "-c", RUN, "train", "--preset", "tiny", "--ranks", "2"]


def losses(out: Path, *arguments: str) -> list[float]:
    command = [*COMMAND, "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    return [step["loss"] for step in report["steps"]]


@pytest.mark.slow
def test_the_demo_trains_the_same(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    offload = f"optimizer=disk,params=host,fraction=0.7,path={scratch}"
    expected = losses(tmp_path / "plain", "--steps", "6")
    found = losses(
        tmp_path / "away", "--steps", "6", "--checkpoint-every", "4", "--offload", offload
    )
    assert found == expected
    checkpoint = tmp_path / "away" / "checkpoints" / "step-000004"
    again = losses(tmp_path / "again", "--steps", "6", "--resume", str(checkpoint))
    assert again == expected
    assert list(scratch.iterdir()) == []


def test_the_demo_passes_refusals_on(tmp_path: Path) -> None:
    command = [*COMMAND, "--out", str(tmp_path / "run"), "--offload", "grads=disk"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "choose params='host' or 'disk'" in " ".join(done.stderr.split())
