"""What every engine does once is done before anything is measured."""

from __future__ import annotations

from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["warm_up"]

MODULES = ("torch.distributed.fsdp", "polyshard.api", "polyshard.description")


def warm_up(device: torch.device) -> None:
    """Import engines and train a little, so that code and workspaces are no engine's memory."""
    for name in MODULES:
        import_module(name)
    small = nn.Linear(8, 8, device=device)
    optimizer = torch.optim.AdamW(small.parameters())
    small(torch.ones(8, 8, device=device)).sum().backward()
    optimizer.step()
    if dist.is_initialized():
        dist.all_reduce(torch.ones(8, device=device))
