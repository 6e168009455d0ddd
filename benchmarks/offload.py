"""Optimizer step and whole step per tier, in turns with no offload; or what a disk gives.

    python -m benchmarks offload --directory DIRECTORY
    python -m benchmarks offload --directory DIRECTORY --disk

One process, gloo, W = 1. Ratios are medians of runs that take turns; memory is as predicted. With
``--disk``: read and write rates of the directory's disk, by block size and threads. Reads are cold:
with direct I/O there is no page cache, and without it the file is synced and its pages are dropped
first. The best pair is what DiskSettings should be given.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import MIB, Found, OnRanks
from polyshard_offload import DiskSettings, Offload
from polyshard_offload.tiers.host_memory import Slab
from polyshard_offload.tiers.swap_file import SwapFile

TIERS = (
    ("device", "device", "host"),
    ("device", "device", "disk"),
    ("host", "host", "host"),
    ("host", "host", "disk"),
    ("disk", "host", "disk"),
    ("disk", "disk", "disk"),
)
"""Of parameters, gradients and the optimizer's state."""


@dataclass(frozen=True)
class Case(OnRanks, width=64, layers=2, mib=1, repeats=1):
    """What is measured."""

    ranks: int = 1
    directory: str = "."
    disk: bool = False
    width: int = 1024
    layers: int = 16
    mib: int = 256
    repeats: int = 5

    def measure(self) -> Found:
        """By parameters, gradients and optimizer; or of the disk."""
        return _disk(self) if self.disk else super().measure()

    def on_rank(self) -> Found:
        plain = Subject((), self)
        found: Found = {"parameters": sum(p.numel() for p in plain.model.parameters())}
        for tiers in TIERS:
            subject = Subject(tiers, self)
            ways = {"plain": plain.turn, "offload": subject.turn}
            times = harness.in_turns(ways, self.repeats, warmup=2)
            step, whole = ({n: [t[i] for t in turns] for n, turns in times.items()} for i in (0, 1))
            assert subject.offload is not None
            found["-".join(tiers)] = {
                "step ms": 1e3 * median(step["offload"]),
                "x none": harness.paired(step["offload"], step["plain"]),
                "whole x none": harness.paired(whole["offload"], whole["plain"]),
                "memory": str(subject.offload.memory(subject.optimizer)),
            }
            del subject
        return found


class Subject:
    """A stack of layers and its optimizer on some tiers; none is no offload."""

    def __init__(self, tiers: tuple[str, ...], case: Case) -> None:
        self.offload = None
        if tiers:
            places: Any = dict(zip(("params", "grads", "optimizer"), tiers, strict=True))
            disk = DiskSettings(path=Path(case.directory))
            self.offload = Offload(**places, disk=disk, chunk_bytes=16 << 20)
        plugins = [] if self.offload is None else [self.offload]
        self.model = harness.linear_model(case.width, case.layers, plugins=plugins)
        made = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.optimizer = made if self.offload is None else self.offload.wrap(made)
        self.input = torch.randn(64, case.width)

    def turn(self, _: int) -> tuple[float, float]:
        """Seconds of the optimizer's step, and of all."""
        backward = harness.seconds(lambda: self.model(self.input).square().mean().backward())
        step = harness.seconds(self.optimizer.step)
        self.optimizer.zero_grad()
        return step, backward + step


def _disk(case: Case) -> Found:
    """GB/s by direct I/O, threads and MiB of a block."""
    found: Found = {}
    for direct, threads, block in product((True, False), (1, 4, 8), (1, 8)):
        settings = DiskSettings(
            path=Path(case.directory), io_threads=threads, block_bytes=block * MIB, direct=direct
        )
        write, read = _rates(settings, case.mib * MIB, case.repeats)
        name = f"{'direct' if direct else 'buffered'}, {threads} threads, {block} MiB"
        found[name] = {"write GB/s": write, "read GB/s": read}
    # A step reads and writes the same bytes.
    best = min(found, key=lambda name: sum(1 / rate for rate in found[name].values()))
    return {**found, "best": best}


def _rates(settings: DiskSettings, nbytes: int, repeats: int) -> tuple[float, float]:
    """Median GB/s of writing and of reading ``nbytes``."""
    file = SwapFile(settings, "benchmark", 0)
    memory = Slab.of_host(nbytes, pinned=False).lease(0, nbytes)
    memory.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    offset = file.allocate(nbytes)
    file.write(offset, memory)  # the first write allocates
    writes, reads = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        file.write(offset, memory)
        os.fdatasync(file.descriptor)
        writes.append(nbytes / (time.perf_counter() - begin) / 1e9)
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        reads.append(nbytes / harness.seconds(lambda: file.read(offset, memory)) / 1e9)
    return median(writes), median(reads)
