"""Held-out loss of the demonstration training with and without quantized communication.

    python -m benchmarks quantized.accuracy [--steps 200] [--seeds 3] [--lr 1e-3]

Every row is trained with the same seeds; a difference is to the native run of the same seed. Needs
polyshard-demo and polyshard-quantized.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks import harness
from benchmarks.harness import Found


@dataclass(frozen=True)
class Case(harness.Case, steps=2, seeds=1, preset="tiny", rows=("int8",)):
    """What is trained, and with which formats beside native ones."""

    steps: int = 200
    seeds: int = 3
    lr: float = 1e-3
    preset: str = "small"
    rows: tuple[str, ...] = (
        *("int8,native", "int8", "e4m3", "native,int4"),
        *("int8,int4", "int4,native", "int4"),
    )

    def measure(self) -> Found:
        """Losses of every seed by formats, and differences to native."""
        seeds = range(self.seeds)
        native = [held_out("", seed, self) for seed in seeds]
        found: Found = {
            "native": {"losses": str(native), "spread of seeds": max(native) - min(native)}
        }
        for row in self.rows:
            losses = [held_out(row, seed, self) for seed in seeds]
            differences = [a - b for a, b in zip(losses, native, strict=True)]
            found[row] = {
                "losses": str(losses),
                "mean difference": mean(differences),
                "largest difference": max(differences, key=abs),
            }
        return found


def held_out(quantize: str, seed: int, case: Case) -> float:
    """Train once; the held-out loss at the end, in nats per byte."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", "from polyshard_cli.main import main; main()", "train"]
        words += ["--out", folder, "--batch", "8", "--sequence", "64", "--lr", str(case.lr)]
        words += ["--preset", case.preset, "--steps", str(case.steps), "--seed", str(seed)]
        words += ["--eval-every", "0", "--checkpoint-every", "0", "--no-page"]
        words += ["--quantize", quantize] if quantize else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
        loss: float = json.loads(Path(folder, "report.json").read_text("utf-8"))["held_out_loss"]
    return loss
