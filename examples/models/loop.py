"""The training that all of these share; on one process it is the same function."""

from __future__ import annotations

from collections.abc import Sequence

import corpus
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard import clip_grad_norm_


def train(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    mesh: DeviceMesh | None = None,
) -> list[float]:
    """Loss of each step's whole batch, in nats a byte, the same on every rank.

    Args:
        model: that computes its loss from tokens and labels.
        optimizers: each steps once a batch.
        steps: how many.
        mesh: of the data-parallel ranks, among which batches are divided; one process has none.
    """
    model.train()
    part, parts = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    losses = []
    for step in range(steps):
        tokens = corpus.batch(step, part, parts)
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().float() / parts
        if mesh is not None:
            dist.all_reduce(mean, group=mesh.get_group())
        losses.append(mean.item())
    return losses
