"""Fine-tune with Muon: hidden matrices by ``MatrixOptimizer``, the rest by AdamW.

python examples/models/muon.py runs/base runs/tuned
"""

from __future__ import annotations

import argparse
from pathlib import Path

import llama
import loop
import ranks
import torch

from polyshard_optimizers import MatrixOptimizer

LR_MATRICES, LR_REST = 0.02, 1e-3


def tune(base: Path, out: Path, *, steps: int, tp: int) -> list[float]:
    """From one folder to another; each matrix is orthogonalized once, on one rank."""
    mesh = llama.meshes(tp)
    muon = MatrixOptimizer(torch.optim.Muon, lr=LR_MATRICES)
    model = llama.load(base, mesh, [muon])
    rest = torch.optim.AdamW(muon.rest(model), lr=LR_REST)
    losses = loop.train(model, [muon.optimizer(model), rest], steps, mesh["dp"])
    llama.export(model, out)
    return losses


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description="Fine-tune a Llama with Muon.")
    flags.add_argument("base", type=Path, help="folder of the model to begin with")
    flags.add_argument("out", type=Path, help="folder for the result")
    flags.add_argument("--steps", type=int, default=50)
    flags.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    given = flags.parse_args()
    ranks.run(lambda: tune(given.base, given.out, steps=given.steps, tp=given.tp), 2)
