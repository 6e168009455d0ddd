"""Physical memory that moves between address ranges instead of being faulted in anew.

[Note: moving pages]
A freed 64 MiB block goes back to the kernel, and the next allocation pays a page fault and a
zeroing per page: on the machines measured, two to four times the cost of filling it. ``mremap``
moves pages from one address range to another by relinking page tables, a few microseconds per
2 MiB. Every buffer therefore keeps a range of its own (aliases saved by autograd stay valid) and
the pages wander: a released range *offers* its pages, and the next range to be filled takes them,
or the very same range finds its pages still in place and pays nothing.

``MREMAP_DONTUNMAP`` leaves the emptied range mapped, so that no other allocation can land there:
a released buffer (which its gate keeps closed) never shows memory of another owner.

[Note: pages between steps]
What one step needed the next one needs again, and pages given back are faulted in anew. So a pool
keeps its pages, but lends them: after a step, and after a forward without grad mode, the kernel may
take unused ones whenever memory is short (``MADV_FREE``). Until it does so, using them again costs
nothing.

Source: mremap(2), flags MREMAP_MAYMOVE, MREMAP_FIXED (2.3.31), MREMAP_DONTUNMAP (5.7); madvise(2),
MADV_DONTNEED, MADV_FREE (4.5).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import weakref
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

EXTENT_BYTES = 2 << 20
"""Unit of moving: a page-table leaf, and a huge page where the kernel grants them."""

_PROT_READ_WRITE = 0x1 | 0x2
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_MADV_FREE = 8
_MADV_HUGEPAGE = 14
_MAP_FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mremap.restype = pointer
    libc.mremap.argtypes = [pointer, size, size, number, pointer]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


class PageRange:
    """A private address range of whole extents, reserved for life and empty at first."""

    def __init__(self, nbytes: int) -> None:
        """Reserve room for ``nbytes``, aligned to an extent."""
        self.extents = -(-nbytes // EXTENT_BYTES)
        length = (self.extents + 1) * EXTENT_BYTES
        raw = _libc().mmap(None, length, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        if raw == _MAP_FAILED:
            raise MemoryError(f"mmap of {length} bytes failed: {os.strerror(ctypes.get_errno())}")
        self.start = -(-raw // EXTENT_BYTES) * EXTENT_BYTES
        _libc().madvise(self.start, self.extents * EXTENT_BYTES, _MADV_HUGEPAGE)
        self.filled: list[bool] = [False] * self.extents
        # Tensors over the range may outlive it at exit, where the kernel unmaps by itself.
        weakref.finalize(self, _libc().munmap, raw, length).atexit = False

    def lend(self) -> None:
        """Let the kernel take the pages, whose contents are not needed, until they are written."""
        if True in self.filled:
            _libc().madvise(self.start, self.extents * EXTENT_BYTES, _MADV_FREE)

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]`` over the range; its storage keeps the range alive."""
        array = (ctypes.c_uint8 * max(numel * dtype.itemsize, 1)).from_address(self.start)
        array.page_range = self  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=dtype, count=numel)


class Borrower(Protocol):
    """Has pages that others may use while no tensor in them is held."""

    def rest(self) -> None:
        """Give the pages back if their contents are not needed."""
        ...


@dataclass(eq=False)
class PagePool:
    """Extents that are not in use, by the range they last belonged to.

    One pool serves all groups that run one after another. It holds ranges weakly by their own
    offers: a dropped range takes its unused pages with it.
    """

    _offers: list[weakref.ref[PageRange]] = field(default_factory=list)
    borrowers: weakref.WeakSet[Borrower] = field(default_factory=weakref.WeakSet)
    """Other holders of its pages, which give them back before a forward."""

    def recall(self) -> None:
        """A forward begins: have borrowers give back what is not held."""
        for borrower in tuple(self.borrowers):
            borrower.rest()

    def offer(self, released: PageRange) -> None:
        """Let others take the pages of ``released``."""
        self._offers.append(weakref.ref(released))

    def lend(self) -> None:
        """Let the kernel take unused pages. See [Note: pages between steps]."""
        for offer in self._offers:
            donor = offer()
            if donor is not None:
                donor.lend()

    def fill(self, wanted: PageRange) -> None:
        """Back ``wanted`` with pages: its own if still there, then offered, else fresh ones."""
        self._offers = [o for o in self._offers if o() is not wanted]
        while False in wanted.filled and (donor := self._donor()) is not None:
            _move_run(donor, wanted)
        wanted.filled = [True] * wanted.extents

    def _donor(self) -> PageRange | None:
        """The range released last that still has pages: its lines are the warmest in cache."""
        while self._offers:
            donor = self._offers[-1]()
            if donor is not None and True in donor.filled:
                return donor
            self._offers.pop()
        return None


def _run(filled: list[bool], wanted: bool) -> tuple[int, int]:
    """Start and length of the first run of ``wanted`` flags."""
    start = filled.index(wanted)
    stop = start
    while stop < len(filled) and filled[stop] is wanted:
        stop += 1
    return start, stop - start


def _move_run(donor: PageRange, target: PageRange) -> None:
    source_start, available = _run(donor.filled, wanted=True)
    target_start, missing = _run(target.filled, wanted=False)
    count = min(available, missing)
    moved = _libc().mremap(
        donor.start + source_start * EXTENT_BYTES,
        count * EXTENT_BYTES,
        count * EXTENT_BYTES,
        _MREMAP_MAYMOVE_FIXED_DONTUNMAP,
        target.start + target_start * EXTENT_BYTES,
    )
    if moved == _MAP_FAILED:
        raise MemoryError(f"mremap failed: {os.strerror(ctypes.get_errno())}")
    donor.filled[source_start : source_start + count] = [False] * count
    target.filled[target_start : target_start + count] = [True] * count


@cache
def pages_can_move() -> bool:
    """Whether this kernel moves pages as [Note: moving pages] needs; probed once per process."""
    if sys.platform != "linux" or os.environ.get("POLYSHARD_MOVE_PAGES") == "0":
        return False
    try:
        first, second, pool = PageRange(1), PageRange(1), PagePool()
        pool.fill(first)
        source, target = first.tensor(1, torch.uint8), second.tensor(1, torch.uint8)
        source.fill_(7)
        pool.offer(first)
        pool.fill(second)
    except (OSError, AttributeError, MemoryError):
        return False
    return int(target[0]) == 7
