"""The smallest interface of the disk tier: whole reads and writes of one block, over system calls.

``os.preadv`` and ``os.pwritev`` release the interpreter's lock, so a few threads fill a device's
queue. Either may move less than asked, be interrupted, or refuse direct I/O half way.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from polyshard_offload.settings import PAGE_BYTES


@dataclass(frozen=True)
class Calls:
    """The system calls in use; tests put faults here."""

    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate


class Blocks(Protocol):
    """Moves blocks between memory and one open file."""

    @property
    def direct(self) -> bool:
        """Whether offsets, sizes and addresses must be multiples of a page."""
        ...

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill ``memory`` from byte ``offset`` of the file on."""
        ...

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of ``memory`` from byte ``offset`` of the file on."""
        ...


class PosixBlocks:
    """Blocks through the kernel, past its page cache if wanted and allowed."""

    def __init__(self, descriptor: int, direct: object, calls: Calls) -> None:
        """``direct`` is True, False or ``"auto"``: try, and go without where it is refused.

        Raises:
            OSError: when direct I/O is demanded and refused.
        """
        self._descriptor = descriptor
        self._calls = calls
        self._may_fall_back = direct == "auto"
        self.direct = False
        if direct is not False:
            self._set_direct()

    def _set_direct(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            self.direct = True
        except OSError:
            if not self._may_fall_back:
                raise

    def _fall_back(self, error: OSError) -> None:
        """Go on through the page cache; some file systems refuse only when it comes to moving.

        Raises:
            OSError: ``error``, when that was not the reason or is not allowed.
        """
        if not (self.direct and self._may_fall_back and error.errno == errno.EINVAL):
            raise error
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def read(self, memory: memoryview, offset: int) -> None:
        """See :class:`Blocks`."""
        self._move(self._calls.preadv, memory, offset)

    def write(self, memory: memoryview, offset: int) -> None:
        """See :class:`Blocks`."""
        self._move(self._calls.pwritev, memory, offset)

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        memory: memoryview,
        offset: int,
    ) -> None:
        done = 0
        while done < len(memory):
            try:
                moved = call(self._descriptor, [memory[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                self._fall_back(error)
                continue
            if moved <= 0:
                raise OSError(errno.EIO, f"end of file at byte {offset + done}")
            done += moved
            if self.direct and done < len(memory):
                done -= done % PAGE_BYTES  # direct I/O goes on at whole pages only


class KvikioBlocks:
    """Blocks through RAPIDS' kvikio: GPUDirect Storage where the system has it, else its threads.

    kvikio opens files by name, so it is given the one that ``/proc`` keeps for a descriptor.
    """

    direct = False

    def __init__(self, descriptor: int) -> None:
        """Open the file of ``descriptor`` once more.

        Raises:
            ImportError: without kvikio.
        """
        import kvikio  # type: ignore[import-not-found,unused-ignore]

        self._file = kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r+")

    def read(self, memory: memoryview, offset: int) -> None:
        """See :class:`Blocks`."""
        self._check(self._file.read(memory, len(memory), offset), memory, offset)

    def write(self, memory: memoryview, offset: int) -> None:
        """See :class:`Blocks`."""
        self._check(self._file.write(memory, len(memory), offset), memory, offset)

    @staticmethod
    def _check(moved: int, memory: memoryview, offset: int) -> None:
        if moved != len(memory):
            raise OSError(errno.EIO, f"moved {moved} of {len(memory)} bytes at byte {offset}")
