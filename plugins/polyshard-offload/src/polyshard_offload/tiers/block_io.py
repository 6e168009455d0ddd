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
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

from polyshard_offload.settings import PAGE_BYTES
from polyshard_offload.tiers.host_memory import bytes_of


@dataclass(frozen=True)
class Calls:
    """The system calls in use; tests replace them to make faults."""

    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate


class Blocks(Protocol):
    """Moves blocks between memory and one open file."""

    direct: bool
    """Whether offsets, sizes and addresses must be multiples of a page."""

    def read(self, tensor: Tensor, offset: int) -> None:
        """Fill ``tensor`` (``[nbytes]`` uint8) from byte ``offset`` of the file on."""
        ...

    def write(self, tensor: Tensor, offset: int) -> None:
        """Write all of ``tensor`` (``[nbytes]`` uint8) from byte ``offset`` of the file on."""
        ...


class PosixBlocks(Blocks):
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

    def _fall_back(self, error: OSError, *, was_direct: bool) -> None:
        """Use the page cache from now on; some file systems refuse only when bytes are moved.

        Args:
            error: of a call.
            was_direct: whether it began with direct I/O, which another thread may have ended since.

        Raises:
            OSError: ``error``, when that was not the reason or is not allowed.
        """
        if not (was_direct and self._may_fall_back and error.errno == errno.EINVAL):
            raise error
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    @override
    def read(self, tensor: Tensor, offset: int) -> None:
        self._move(self._calls.preadv, bytes_of(tensor), offset)

    @override
    def write(self, tensor: Tensor, offset: int) -> None:
        self._move(self._calls.pwritev, bytes_of(tensor), offset)

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        memory: memoryview,
        offset: int,
    ) -> None:
        done = 0
        while done < len(memory):
            was_direct = self.direct
            try:
                moved = call(self._descriptor, [memory[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                self._fall_back(error, was_direct=was_direct)
                continue
            if moved <= 0:
                raise OSError(errno.EIO, f"end of file at byte {offset + done}")
            done += moved
            if self.direct and done < len(memory):
                done -= done % PAGE_BYTES  # direct I/O continues at whole pages only


class KvikioBlocks(Blocks):
    """Blocks through RAPIDS' kvikio: GPUDirect Storage where the system has it, else its threads.

    kvikio opens files by name, twice (for direct I/O and without), so it is given the name that
    ``/proc`` keeps for a descriptor. Device memory goes to it as the tensor itself, which it knows
    by ``__cuda_array_interface__``; host memory as its bytes. Calls return how much was moved.
    Source: ``kvikio.CuFile`` of kvikio 26.10.
    """

    direct = False

    def __init__(self, descriptor: int) -> None:
        """Open the file of ``descriptor`` once more.

        Raises:
            ImportError: without kvikio.
        """
        import kvikio  # type: ignore[import-not-found,unused-ignore]

        self._file: Any = kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r+")

    @override
    def read(self, tensor: Tensor, offset: int) -> None:
        self._move(self._file.read, tensor, offset)

    @override
    def write(self, tensor: Tensor, offset: int) -> None:
        self._move(self._file.write, tensor, offset)

    @staticmethod
    def _move(call: Callable[[object, int, int], int], tensor: Tensor, offset: int) -> None:
        memory = bytes_of(tensor) if tensor.device.type == "cpu" else tensor
        try:
            moved = call(memory, tensor.nbytes, offset)
        except RuntimeError as error:  # all that its C++ side raises
            raise OSError(errno.EIO, str(error)) from error
        if moved != tensor.nbytes:
            raise OSError(errno.EIO, f"moved {moved} of {tensor.nbytes} bytes at byte {offset}")
