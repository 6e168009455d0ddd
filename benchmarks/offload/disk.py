"""Read and write rates of a directory's disk, by block size and threads.

    python -m benchmarks.offload.disk DIRECTORY

Reads are cold: with direct I/O there is no page cache, and without it the file is synced and its
pages are dropped first. The best pair is what DiskSettings should be given.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch

from polyshard_offload import DiskSettings
from polyshard_offload.tiers.host_memory import Slab
from polyshard_offload.tiers.swap_file import SwapFile

MIB = 1 << 20


def rates(settings: DiskSettings, nbytes: int, repeats: int) -> tuple[float, float]:
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
        begin = time.perf_counter()
        file.read(offset, memory)
        reads.append(nbytes / (time.perf_counter() - begin) / 1e9)
    return statistics.median(writes), statistics.median(reads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    print(f"{'direct':>6} {'threads':>7} {'block MiB':>9} {'write GB/s':>10} {'read GB/s':>9}")
    found = []
    for direct in (True, False):
        for threads in (1, 4, 8):
            for block in (1, 8):
                settings = DiskSettings(
                    path=chosen.directory,
                    io_threads=threads,
                    block_bytes=block * MIB,
                    direct=direct,
                )
                write, read = rates(settings, chosen.mib * MIB, chosen.repeats)
                found.append((1 / write + 1 / read, settings))
                print(f"{direct!s:>6} {threads:>7} {block:>9} {write:>10.2f} {read:>9.2f}")
    print("best for a step, which reads and writes the same bytes:", min(found, key=_cost)[1])


def _cost(row: tuple[float, DiskSettings]) -> float:
    return row[0]


if __name__ == "__main__":
    main()
