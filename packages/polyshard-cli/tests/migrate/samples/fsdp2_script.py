"""FSDP2, with the names of several modules."""

import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,  # what sharded modules are
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.utils import clip_grad_norm_


def train(rank: int, steps: int = 4) -> list[float]:
    """Losses of this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model[0], mp_policy=policy)
    fsdp.fully_shard(model[2], mp_policy=policy, reshard_after_forward=False)  # stays gathered
    fully_shard(model, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = (model(torch.randn(5, 6)) - 1).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
