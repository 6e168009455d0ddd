"""accelerate: FSDP2 by its plugin; ``prepare`` takes a model that is sharded already as it is."""

from __future__ import annotations

import argparse

import common
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor


def loop(arguments: argparse.Namespace) -> list[float]:
    """Accumulation over two batches, and clipping, by accelerate's own calls."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    common.admit_fsdp(accelerator, plugin)
    model = common.shard_llama(common.tiny_llama(), common.engine(arguments.engine))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
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
