"""A process that holds so much before the first step, and so much in one."""

from __future__ import annotations

import torch

from polyshard_cli.compare.training.memory import Memory, Meter


def peak_after(rank: int, size: int, building: int, stepping: int) -> Memory:
    del rank, size
    meter = Meter(torch.device("cpu"))
    torch.ones(building, dtype=torch.uint8)
    meter.begin_steps()
    torch.ones(stepping, dtype=torch.uint8)
    return meter.read()
