"""Seconds of a piece of work, until the device is done with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Work = Callable[[], object]


def seconds(work: Work, device: torch.device) -> float:
    """Time one call; what was launched before it is waited for first."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
