"""Host memory: page-aligned slabs, and tensors that tell when they are held no more.

[Note: leases]
Memory is handed out as a *lease*: a tensor over a part of a slab. Its storage keeps a small buffer
object alive, and that object ends exactly when the last view of the tensor does. A finalizer on it
returns the memory, so a region is never used again while a tensor (a gradient the user kept, say)
still uses it.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyshard_offload.settings import PAGE_BYTES
from polyshard_offload.tiers.file_map import FileMap

SLAB_BYTES = 64 << 20
"""Arenas grow by up to this many bytes, or by one larger request."""


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages, in bytes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, eq=False)
class Slab:
    """A range of memory and the object that owns it."""

    address: int
    nbytes: int
    owner: object

    @classmethod
    def of_host(cls, nbytes: int, *, pinned: bool) -> Slab:
        """Fresh host memory, page-aligned; page-locked when ``pinned``."""
        if pinned:
            memory = _locked(nbytes)
            if memory.data_ptr() % PAGE_BYTES:  # CUDA gives whole pages; another device may not
                memory = _locked(nbytes + PAGE_BYTES)
            return cls(pages(memory.data_ptr()), nbytes, memory)
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = (ctypes.c_uint8 * nbytes).from_buffer(mapped)  # unmapped when this ends
        return cls(ctypes.addressof(raw), nbytes, raw)

    @classmethod
    def of_file(cls, descriptor: int, offset: int, nbytes: int) -> Slab:
        """A shared mapping of whole pages of a file."""
        return cls.of_map(FileMap(descriptor, offset, nbytes))

    @classmethod
    def of_map(cls, mapped: FileMap) -> Slab:
        """Memory that is mapped already; it stays so as long as a tensor uses it."""
        return cls(mapped.address, mapped.nbytes, mapped)

    def lease(self, start: int, nbytes: int, on_return: Callable[[], None] | None = None) -> Tensor:
        """``[nbytes]`` uint8 from byte ``start`` on. See [Note: leases]."""
        assert start + nbytes <= self.nbytes
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        array = (ctypes.c_uint8 * nbytes).from_address(self.address + start)
        array.owner = self.owner  # type: ignore[attr-defined]
        if on_return is not None:
            weakref.finalize(array, on_return).atexit = False
        return torch.frombuffer(array, dtype=torch.uint8)


def typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """``raw`` (uint8) as a flat tensor of ``dtype``; leases start on pages, so it is aligned."""
    return raw.view(dtype)


@dataclass(eq=False)
class Arena:
    """Host memory of one kind, taken in slabs and handed out in pages.

    One arena serves all groups of a dtype: a few large (page-locked) allocations instead of one a
    parameter. ``taken_bytes`` is what is on lease, ``peak_bytes`` the most that ever was.
    """

    pinned: bool = False
    taken_bytes: int = 0
    peak_bytes: int = 0
    _slab: Slab | None = None
    _used: int = 0
    _free: dict[int, list[tuple[Slab, int]]] = field(default_factory=dict)

    def take(self, nbytes: int) -> Tensor:
        """``[nbytes]`` uint8, contents undefined; returns by itself when no tensor uses it."""
        size = pages(nbytes)
        slab, start = self._place(size)
        self.taken_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)
        return slab.lease(start, nbytes, lambda: self._put_back(slab, start, size))

    def _put_back(self, slab: Slab, start: int, size: int) -> None:
        self.taken_bytes -= size
        self._free.setdefault(size, []).append((slab, start))

    def _place(self, size: int) -> tuple[Slab, int]:
        if self._free.get(size):
            return self._free[size].pop()
        if size >= SLAB_BYTES:
            return Slab.of_host(size, pinned=self.pinned), 0
        if self._slab is None or self._used + size > self._slab.nbytes:
            self._slab, self._used = Slab.of_host(self._next_slab(size), pinned=self.pinned), 0
        start, self._used = self._used, self._used + size
        return self._slab, start

    def _next_slab(self, size: int) -> int:
        """Bytes of it: twice the last, so that a small model locks little memory.

        A power of two, which torch rounds page-locked memory up to.
        """
        twice = 0 if self._slab is None else 2 * self._slab.nbytes
        return 1 << (max(size, min(twice, SLAB_BYTES)) - 1).bit_length()


def _locked(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of a contiguous tensor, on any device."""
    host = tensor.cpu()  # held: a copy from a device would go before its bytes are read
    return zlib.crc32(bytes_of(host))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor of any dtype, which must stay alive meanwhile.

    Not through ``numpy()``: that makes a storage refuse to be resized for the rest of its life.
    """
    assert tensor.device.type == "cpu"
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
