"""Fine-tune all weights: tensor parallelism x FSDP, parameters travel as int8; export the result.

python examples/models/llama.py runs/base
python examples/models/full.py runs/base runs/tuned --tp 2
python examples/models/completion.py runs/tuned "The "
"""

from __future__ import annotations

import argparse
from pathlib import Path

import llama
import loop
import ranks
import torch

from polyshard_quantized import Int8Block, QuantizedComm


def tune(base: Path, out: Path, *, steps: int, tp: int, int8: bool = True) -> list[float]:
    """From one folder to another; the losses."""
    mesh = llama.meshes(tp)
    model = llama.load(base, mesh, quantized() if int8 else [])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = loop.train(model, [optimizer], steps, mesh["dp"])
    llama.export(model, out)
    return losses


def quantized() -> list[QuantizedComm]:
    """Parameters travel as 8 bits; gradients as they are."""
    return [QuantizedComm(weights=Int8Block(256))]


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description="Fine-tune all weights of a Llama.")
    flags.add_argument("base", type=Path, help="folder of the model to begin with")
    flags.add_argument("out", type=Path, help="folder for the result")
    flags.add_argument("--steps", type=int, default=50)
    flags.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    flags.add_argument("--native", action="store_true", help="parameters travel as they are")
    given = flags.parse_args()
    int8 = not given.native
    ranks.run(lambda: tune(given.base, given.out, steps=given.steps, tp=given.tp, int8=int8), 4)
