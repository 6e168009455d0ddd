"""peft: LoRA on a Llama of ``transformers``; frozen and trainable parameters share units."""

from __future__ import annotations

import argparse

import common
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor


def loop(arguments: argparse.Namespace) -> list[float]:
    """Adapters on, then everything sharded; the optimizer sees what trains."""
    dist.init_process_group("gloo")
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(common.tiny_llama(), adapters)
    common.shard_llama(model, common.engine(arguments.engine))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-1)
    losses = []
    for step in range(common.STEPS):
        tokens = common.batch(step, dist.get_rank())
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    common.main(loop, common.parser(__doc__))
