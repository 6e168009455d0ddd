"""Held-out loss of the demonstration training with and without quantized communication.

    python -m benchmarks.quantized.accuracy [--steps 200] [--seeds 3] [--lr 1e-3]

Every row is trained with the same seeds; a difference is to the native run of the same seed. Needs
polyshard-demo and polyshard-quantized.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import table

ROWS = ("", "int8,native", "int8", "e4m3", "native,int4", "int8,int4", "int4,native", "int4")


def held_out(quantize: str, seed: int, options: argparse.Namespace) -> float:
    """Train once; the held-out loss at the end, in nats per byte."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from polyshard_cli.main import main; main()", "train"]
        command += ["--out", folder, "--batch", "8", "--sequence", "64", "--lr", str(options.lr)]
        command += ["--preset", options.preset, "--steps", str(options.steps)]
        command += ["--seed", str(seed), "--eval-every", "0", "--checkpoint-every", "0"]
        command += ["--no-page"]
        if quantize:
            command += ["--quantize", quantize]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        report = json.loads(Path(folder, "report.json").read_text("utf-8"))
    loss: float = report["held_out_loss"]
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--rows", nargs="*", default=ROWS)
    options = parser.parse_args()
    seeds = range(options.seeds)
    native: list[float] = []
    lines = []
    for row in options.rows:
        losses = [held_out(row, seed, options) for seed in seeds]
        native = native or losses
        differences = [a - b for a, b in zip(losses, native, strict=True)]
        name = row or f"native (spread of seeds {max(losses) - min(losses):.4f})"
        tail = f"{statistics.mean(differences):+.4f}", f"{max(differences, key=abs):+.4f}"
        lines.append([name, *(f"{loss:.4f}" for loss in losses), *tail])
        print(*lines[-1], flush=True)
    seeds_of = (f"seed {seed}" for seed in seeds)
    heads = ["parameters, gradients", *seeds_of, "mean difference", "largest difference"]
    print("", *table(heads, lines), sep="\n")


if __name__ == "__main__":
    main()
