"""Windows on parameters that tell which of their pages were written to.

[Note: who may write]
Users write to parameters between steps: they load state dicts, average weights, clip, or step with
an optimizer that was not wrapped. Version counters miss much of it (foreach and fused optimizers,
``torch._foreach_*``, ``.data``), but the kernel does not: where checksums are on, the window is a
*private* mapping of the file. An unwritten page is the file's own; a page that is written to
becomes one of the process's own, which ``/proc/self/pagemap`` shows for as long as it is mapped,
swapped out or not. Before a shard is read such pages are put into the file and given up. Their
parameters' checksums count no longer, since what a user writes is right by definition; any other
difference came about behind the process's back.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from polyshard_offload.tiers.file_map import FileMap
from polyshard_offload.tiers.host_memory import Slab, pages

_PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000
"""MAP_NORESERVE: only pages that are written to take memory."""

_NOT_WRITTEN = torch.zeros(1, dtype=torch.int8, device="cpu")


@dataclass(frozen=True)
class PrivateWindow:
    """See [Note: who may write]."""

    memory: Tensor
    """``[nbytes]`` uint8, whole pages."""
    _mapped: FileMap

    @classmethod
    def of_file(
        cls,
        descriptor: int,
        offset: int,
        nbytes: int,
        on_return: Callable[[], None] | None = None,
    ) -> PrivateWindow:
        """On a part of a file that begins with a page; ``on_return`` when it is held no more."""
        size = pages(nbytes)
        mapped = FileMap(descriptor, offset, size, mmap.MAP_PRIVATE | _NO_RESERVE)
        return cls(Slab.of_map(mapped).lease(0, size, on_return), mapped)

    def written(self) -> list[tuple[int, int]]:
        """First and last-but-one byte of every run of pages that was written to."""
        flags = _page_flags(self.memory.data_ptr(), self.memory.numel())
        there = (flags < 0) | (flags >> 62 & 1).bool()
        own = there & ~(flags >> 61 & 1).bool()
        if not bool(own.any()):
            return []
        edges = own.to(torch.int8).diff(prepend=_NOT_WRITTEN, append=_NOT_WRITTEN).nonzero()
        bounds = [int(edge) * _PAGE for edge in edges.flatten()]
        return list(zip(bounds[::2], bounds[1::2], strict=True))

    def give_up(self, start: int, stop: int) -> None:
        """Show the file again, for bytes that have been put there."""
        self._mapped.give_up(start, stop - start)


def _page_flags(address: int, nbytes: int) -> Tensor:
    """One int64 a page: bit 63 mapped, 62 swapped out, 61 shared with a file."""
    descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        count = -(-nbytes // _PAGE)
        found = os.pread(descriptor, 8 * count, address // _PAGE * 8)
    finally:
        os.close(descriptor)
    if len(found) != 8 * count:
        raise OSError("short read from /proc/self/pagemap")
    return torch.frombuffer(bytearray(found), dtype=torch.int64)


@cache
def writes_show() -> bool:
    """Whether this kernel tells which pages were written to; probed once per process."""
    if sys.platform != "linux" or sys.byteorder != "little":
        return False
    try:
        descriptor = os.memfd_create("polyshard-offload")
        try:
            os.ftruncate(descriptor, 3 * _PAGE)
            window = PrivateWindow.of_file(descriptor, 0, 3 * _PAGE)
            window.memory.sum()
            before = window.written()
            window.memory[_PAGE] = 1
            after = window.written()
            window.give_up(_PAGE, 2 * _PAGE)
            return [before, after, window.written()] == [[], [(_PAGE, 2 * _PAGE)], []]
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return False
