"""Scratch memory shared by the codecs of one plugin: they work one after another."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

CPU_CHUNK_ELEMENTS = 256 << 10
"""Values worked on at a time on a CPU: 1 MiB of fp32 stays in the second-level cache. Below half of
it, calls cost as much as work; without chunks, encoding takes twice as long."""

DEVICE_CHUNK_ELEMENTS = 16 << 20
"""Values worked on at a time on an accelerator, where launches cost more than memory."""


def chunk_elements(device: torch.device) -> int:
    """How many values to work on at a time."""
    return CPU_CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS


class Workspace:
    """Tensors by purpose, grown as needed and kept. Contents are undefined between uses."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(
        self, purpose: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A contiguous tensor of ``shape``; the next one for the same purpose overlaps it."""
        numel = prod(shape)
        key = (purpose, dtype, device)
        held = self._held.get(key)
        if held is None or held.numel() < numel:
            with torch.inference_mode(mode=False):
                held = self._held[key] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel].view(tuple(shape))
