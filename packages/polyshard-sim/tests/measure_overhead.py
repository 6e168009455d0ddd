"""Host time of an operator after its first call, in microseconds; run it by hand.

python packages/polyshard-sim/tests/measure_overhead.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import polyshard_sim
from polyshard_sim.testing import sim


def microseconds(call: Callable[[], object], rounds: int = 50, calls: int = 20) -> float:
    """Of one call, the least of several rounds."""
    for _ in range(calls):
        call()
    sim().synchronize()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(time.perf_counter() - begin)
        sim().synchronize()
    return min(times) / calls * 1e6


def main() -> None:
    polyshard_sim.enable("lowest")
    x, y = (torch.ones(64, 64, device="sim") for _ in range(2))
    calls: dict[str, Callable[[], object]] = {
        "x.add_(y)": lambda: x.add_(y),
        "x + y": lambda: x + y,
        "x + 1": lambda: x + 1,
        "x @ y": lambda: x @ y,
        "gelu": lambda: F.gelu(x),
        "layer_norm": lambda: F.layer_norm(x, (64,)),
        "empty": lambda: torch.empty(64, 64, device="sim"),
        "view": lambda: x.view(-1),
    }
    for name, call in calls.items():
        print(f"{name:12} {microseconds(call):6.2f} us")


if __name__ == "__main__":
    main()
