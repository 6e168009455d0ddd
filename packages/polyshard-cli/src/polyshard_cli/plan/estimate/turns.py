"""Seconds of something that all ranks do at once, several times over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

TURNS = 7
PINGS = 50
"""Turns of what is too short for a few to tell."""


def seconds_of_turns(work: Callable[[], object], device: torch.device, turns: int = TURNS) -> float:
    """Of one turn of ``work``, in the middle of several, until the slowest rank is done.

    Ranks wait for each other in a step, so what counts where they share cores is when all are done;
    what meeting costs is taken off.
    """
    meeting = _median(lambda: None, device, PINGS)
    return max(_median(work, device, turns) - meeting, 1e-9)


def _median(work: Callable[[], object], device: torch.device, turns: int) -> float:
    found = []
    for _ in range(turns + 1):
        dist.barrier()
        begin = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        dist.barrier()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])
