"""Swap files and bytes to put into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from polyshard_offload import DiskSettings
from polyshard_offload.tiers.block_io import Calls
from polyshard_offload.tiers.host_memory import Slab
from polyshard_offload.tiers.swap_file import SwapFile

BLOCK = 8192


def swap(path: Path, calls: Calls | None = None, **chosen: Any) -> SwapFile:
    return SwapFile(DiskSettings(path=path, block_bytes=BLOCK, **chosen), "things", 3, calls)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def aligned(values: torch.Tensor) -> torch.Tensor:
    memory = Slab.of_host(max(values.numel(), 1), pinned=False).lease(0, values.numel())
    return memory.copy_(values)
