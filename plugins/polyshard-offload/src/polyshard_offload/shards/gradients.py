"""Where reduced gradients rest: in host memory or in a file, never written over while in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from polyshard_offload.shards.staging import StagingState
from polyshard_offload.tiers.host_memory import Arena, typed
from polyshard_offload.tiers.swap_file import SwapFile


class GradientStorage(Protocol):
    """Takes the gradients of one group to where they rest."""

    places_on_stream: bool
    """As a storage's."""

    def place(self, gradient: Tensor) -> Tensor:
        """``gradient`` (``[shard_numel]``) at rest; valid as long as anybody looks at it."""
        ...


@dataclass(eq=False)
class HostGradients:
    """Gradients in host memory; the host waits for them in the ``settle()`` of their storage."""

    arena: Arena
    state: StagingState
    places_on_stream = True

    def place(self, gradient: Tensor) -> Tensor:
        """Copy to the host. See [Note: leases] for when the memory is used again."""
        resting = typed(self.arena.take(gradient.nbytes), gradient.dtype)
        self.state.copy(resting, gradient)
        return resting


@dataclass(eq=False)
class DiskGradients:
    """Gradients in a file, seen through windows: the kernel reads and drops pages as it likes.

    There is a second place only if gradients accumulate over reductions, where the sum so far is
    still in use when the next gradient comes.
    """

    file: SwapFile
    places_on_stream = False
    _free: dict[int, list[int]] = field(default_factory=dict)

    def place(self, gradient: Tensor) -> Tensor:
        """Write to the file; read it back where checksums are on.

        What rests is not checked again: clipping and people may change it through the window.

        Raises:
            StorageError: naming the place.
        """
        nbytes = gradient.nbytes
        free = self._free.setdefault(nbytes, [])
        offset = free.pop() if free else self.file.allocate(nbytes, {gradient.dtype: nbytes})
        self.file.write(offset, gradient.view(torch.uint8))
        self.file.check_written(offset, gradient.view(torch.uint8))
        return typed(self.file.window(offset, nbytes, giver(free, offset)), gradient.dtype)


def giver(free: list[int], offset: int) -> Callable[[], None]:
    """What a window's end calls: ``offset`` may be used again."""
    return lambda: free.append(offset)
