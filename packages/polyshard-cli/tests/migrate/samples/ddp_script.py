"""DDP, with accumulation."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank: int, steps: int = 4) -> list[float]:
    """Losses of this rank."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    losses = []
    for _ in range(steps):
        with model.no_sync():  # the first half of the batch
            (model(torch.randn(2, 5)) - 1).square().mean().backward()
        loss = (model(torch.randn(2, 5)) - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
