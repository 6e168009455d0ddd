"""Figures of this machine, for ``--machine FILE``: seconds of work, the best of several turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from polyshard_plan.errors import PlanError
from polyshard_plan.estimate.machines import Link, Machine

__all__ = ["measure"]

TURNS = 7
WIDTH = 1024
"""Of the matrices that are multiplied."""
COPIED = 64 << 20
"""Bytes that are copied, more than a cache holds."""
SENT = 16 << 20
PINGS = 50


def measure() -> Machine:
    """This machine as one rank of two on it sees it: compute, memory, and a loopback link.

    Figures of the other dtypes and of other hosts are unknown: the link inside stands for both.

    Raises:
        PlanError: where the two ranks that measure the link cannot start.
    """
    device = _device()
    link = _measured_link()
    return Machine(
        name=f"this machine ({os.uname().nodename})",
        backend="nccl" if device.type == "cuda" else "gloo",
        ranks_per_host=max(torch.cuda.device_count(), os.cpu_count() or 1),
        memory_bytes=_memory_bytes(device),
        flops_per_second={"float32": _flops(device, torch.float32)}
        | {"bfloat16": _flops(device, torch.bfloat16)},
        efficiency=1.0,
        memory_bytes_per_second=_memory_rate(device),
        operation_seconds=_operation_seconds(device),
        inside=link,
        between=link,
        host_bytes_per_second=_host_rate(device),
        sources=(f"measured with torch {torch.__version__} on {device.type}",),
    )


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _best(work: Callable[[], object], device: torch.device, repeat: int = 1) -> float:
    """Seconds of one call: the least of several turns, after one that is not counted."""
    found = []
    for _ in range(TURNS + 1):
        begin = time.perf_counter()
        for _ in range(repeat):
            work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        found.append((time.perf_counter() - begin) / repeat)
    return min(found[1:])


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    width = WIDTH if device.type == "cpu" else 8 * WIDTH
    left = torch.ones(width, width, dtype=dtype, device=device)
    return float(2 * width**3 / _best(lambda: left @ left, device))


def _memory_rate(device: torch.device) -> float:
    source = torch.ones(COPIED // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / _best(lambda: target.copy_(source), device)


def _host_rate(device: torch.device) -> float:
    source = torch.ones(COPIED // 4, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return COPIED / _best(lambda: target.copy_(source), device)


def _operation_seconds(device: torch.device) -> float:
    value = torch.ones(8, device=device)
    return _best(lambda: value + value, device, repeat=1000)


def _measured_link() -> Link:
    """Bytes a second and seconds between two processes over gloo on this machine."""
    context = mp.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    with TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        ranks = [
            context.Process(target=_rank, args=(rank, store, there), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        try:
            if not here.poll(120):
                raise PlanError(
                    "--measure: two processes on this machine could not exchange messages within "
                    "two minutes; 'polyshard doctor' looks for the reason"
                )
            seconds, rate = here.recv()
        finally:
            for process in ranks:
                process.join(10)
                if process.is_alive():
                    process.kill()
    return Link(bytes_per_second=rate, latency_seconds=seconds)


def _rank(rank: int, store: str, answer: Connection) -> None:
    """One of two ranks that play ping-pong; the first tells what it took."""
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)
    small, large = torch.zeros(1), torch.zeros(SENT // 4)
    latency = statistics.median(_round_trip(small, rank) for _ in range(PINGS)) / 2
    longest = min(_round_trip(large, rank) for _ in range(TURNS)) / 2
    if rank == 0:
        answer.send((latency, SENT / max(longest - latency, 1e-9)))
    dist.destroy_process_group()


def _round_trip(value: torch.Tensor, rank: int) -> float:
    begin = time.perf_counter()
    if rank == 0:
        dist.send(value, 1)
        dist.recv(value, 1)
    else:
        dist.recv(value, 0)
        dist.send(value, 0)
    return time.perf_counter() - begin
