"""accelerate: polyshard's accelerator, which shards models itself, beside FSDP2 by its plugin."""

from __future__ import annotations

import argparse
from typing import Any

import common
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor


def prepared(engine: str) -> tuple[Accelerator, Any, Any]:
    """Where engines differ: an accelerator, and the model and its optimizer, prepared."""
    model = common.tiny_llama()
    if engine == "polyshard":
        from polyshard_accelerate import PolyshardAccelerator

        accelerator: Accelerator = PolyshardAccelerator(cpu=True, gradient_accumulation_steps=2)
    else:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
        common.admit_fsdp(accelerator, plugin)
        model = common.shard_llama(model, common.engine(engine))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def loop(arguments: argparse.Namespace) -> list[float]:
    """Accumulation over two batches, and clipping, by accelerate's own calls."""
    accelerator, model, optimizer = prepared(arguments.engine)
    losses = []
    for step in range(2 * common.STEPS):
        tokens = common.batch(step, accelerator.process_index)
        with accelerator.accumulate(model):
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    common.main(loop, common.parser(__doc__))
