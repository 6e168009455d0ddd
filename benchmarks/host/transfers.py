"""How fast bytes move between host and device, alone and while the device computes."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Work, seconds

TURNS = 9
MATMULS = 8


def host_transfers(device: str, mib: int, matmul_size: int) -> list[dict[str, Any]]:
    """A row a direction.

    ``overlap`` is the part of the shorter of copy and matmuls that hides behind the other, of 1.
    Without CUDA, host memory is copied to host memory, and nothing runs beside it.
    """
    on_device = torch.zeros(mib << 20, dtype=torch.uint8, device=device)
    on_host = torch.zeros(mib << 20, dtype=torch.uint8, pin_memory=device == "cuda")
    pairs = {"host to device": (on_device, on_host), "device to host": (on_host, on_device)}
    matrix = torch.ones(matmul_size, matmul_size, device=device)
    return [_row(name, target, source, matrix) for name, (target, source) in pairs.items()]


def _row(name: str, target: Tensor, source: Tensor, matrix: Tensor) -> dict[str, Any]:
    def compute() -> None:
        for _ in range(MATMULS):
            matrix @ matrix

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    def alone(work: Work) -> float:
        return median([seconds(work, matrix.device) for _ in range(TURNS + 1)][1:])

    copying = alone(copy)
    row: dict[str, Any] = {"direction": name, "GB/s alone": source.nbytes / copying / 1e9}
    row |= {"GB/s under matmul": None, "matmul slowdown": None, "overlap": None}
    if matrix.device.type != "cuda":
        return row
    computing = alone(compute)
    copied, computed, both = _together(copy, compute)
    return row | {
        "GB/s under matmul": source.nbytes / copied / 1e9,
        "matmul slowdown": computed / computing,
        "overlap": (copying + computing - both) / min(copying, computing),
    }


def _together(copy: Work, compute: Work) -> tuple[float, float, float]:
    """Median seconds of the copy, of the matmuls, and of both, on two streams at once."""
    streams = [(torch.cuda.Stream(), copy), (torch.cuda.current_stream(), compute)]
    samples = []
    for _ in range(TURNS + 1):
        torch.cuda.synchronize()
        events = []
        begin = time.perf_counter()
        for stream, work in streams:
            with torch.cuda.stream(stream):
                events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                events[-1][0].record()
                work()
                events[-1][1].record()
        torch.cuda.synchronize()
        both = time.perf_counter() - begin
        samples.append([*(first.elapsed_time(last) / 1e3 for first, last in events), both])
    first, second, third = (median(column) for column in zip(*samples[1:], strict=True))
    return first, second, third
