"""How fast bytes move between host and device, alone and while the device computes."""

from __future__ import annotations

import statistics
import time
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

    alone = _median(copy, matrix.device)
    row: dict[str, Any] = {"direction": name, "GB/s alone": source.nbytes / alone / 1e9}
    row |= {"GB/s under matmul": None, "matmul slowdown": None, "overlap": None}
    if matrix.device.type != "cuda":
        return row
    compute_alone = _median(compute, matrix.device)
    copied, computed, both = _together(copy, compute)
    hidden = alone + compute_alone - both
    return row | {
        "GB/s under matmul": source.nbytes / copied / 1e9,
        "matmul slowdown": computed / compute_alone,
        "overlap": hidden / min(alone, compute_alone),
    }


def _median(work: Work, device: torch.device) -> float:
    return statistics.median([seconds(work, device) for _ in range(TURNS + 1)][1:])


def _together(copy: Work, compute: Work) -> tuple[float, float, float]:
    """Median seconds of the copy, of the matmuls, and of both, on two streams at once."""
    side = torch.cuda.Stream()
    samples = []
    for _ in range(TURNS + 1):
        torch.cuda.synchronize()
        copying, computing = _Clock(side), _Clock(torch.cuda.current_stream())
        begin = time.perf_counter()
        with torch.cuda.stream(side), copying:
            copy()
        with computing:
            compute()
        torch.cuda.synchronize()
        samples.append((copying.seconds, computing.seconds, time.perf_counter() - begin))
    first, second, third = zip(*samples[1:], strict=True)
    return statistics.median(first), statistics.median(second), statistics.median(third)


class _Clock:
    """Seconds between two points of a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __enter__(self) -> None:
        self._events[0].record(self._stream)

    def __exit__(self, *_: object) -> None:
        self._events[1].record(self._stream)

    @property
    def seconds(self) -> float:
        """What has passed; ask only after the stream was synchronized."""
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
