"""Mappings of parts of a file, which need the file open only while they are made.

Python's ``mmap`` keeps a duplicate of the descriptor for each of its objects. There is a window for
every parameter, and a process may have as few as 1024 files open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


class FileMap:
    """``nbytes`` of a file from ``offset`` on, mapped for as long as this object is there."""

    def __init__(
        self, descriptor: int, offset: int, nbytes: int, flags: int = mmap.MAP_SHARED
    ) -> None:
        """``offset`` is a multiple of a page.

        Raises:
            OSError: when the kernel refuses.
        """
        found = _libc().mmap(None, nbytes, _PROTECTION, flags, descriptor, offset)
        if found in (None, ctypes.c_void_p(-1).value):
            raise _error()
        self.address: int = found
        self.nbytes = nbytes
        # Tensors over it may be in use until the very end of the process.
        weakref.finalize(self, _libc().munmap, found, nbytes).atexit = False

    def give_up(self, start: int, nbytes: int) -> None:
        """Forget the process's own copies of pages of a private mapping, which shows the file.

        Raises:
            OSError: when the kernel refuses.
        """
        if _libc().madvise(self.address + start, nbytes, mmap.MADV_DONTNEED):
            raise _error()
