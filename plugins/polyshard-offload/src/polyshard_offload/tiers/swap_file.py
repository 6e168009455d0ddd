"""One file of a rank's disk tier: grows in pages, read and written in blocks by a few threads.

[Note: swap files]
A swap file is no checkpoint: it is not read after the process has ended. It never has a name
(see [Note: shared places] of ``nameless`` for file systems without such files), and so is freed by
the kernel when the process ends, however it ends.

Space is reserved before it is used (``posix_fallocate``), so a full disk is an error while planning
and not in the middle of a step. The first page says what the file is and how much of which dtype it
holds, for people who look at it through ``/proc/PID/fd``; ranks with equal shards show equal plans.

[Note: windows]
A *window* is a shared mapping of a part of the file: a tensor whose values are those of the file.
It is what state dicts and users see, so that looking needs no memory and loading no special case.
Those of parameters whose checksums are kept are private, see [Note: who may write]. Steps never
use a window; they read and write explicitly, which reports errors and does not fault. The
kernel keeps both views the same as long as they are not used at the same moment, which is so: steps
and users run one after another.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from polyshard.memory.streams import launched
from polyshard_offload.errors import CorruptedError, StorageError, storage_error
from polyshard_offload.settings import PAGE_BYTES, DiskSettings
from polyshard_offload.tiers.block_io import Blocks, Calls, KvikioBlocks, PosixBlocks
from polyshard_offload.tiers.header import Header
from polyshard_offload.tiers.host_memory import Slab, checksum, pages
from polyshard_offload.tiers.io_pool import IOPool
from polyshard_offload.tiers.nameless import open_nameless
from polyshard_offload.tiers.private_window import PrivateWindow, writes_show


class SwapFile:
    """See [Note: swap files]. ``reserved_bytes`` is what the file takes on disk."""

    tier = "disk"

    def __init__(
        self,
        settings: DiskSettings,
        kind: str,
        rank: int,
        calls: Calls | None = None,
        pool: IOPool | None = None,
    ) -> None:
        """Create the file; ``kind`` (what it holds) and ``rank`` are for messages.

        Raises:
            StorageError: when the directory cannot be used.
            ImportError: for kvikio without the extra ``gds``.
        """
        self._settings = settings
        self._kind = kind
        self._rank = rank
        self._calls = calls or Calls()
        self._checksums: dict[int, int] = {}
        self._header = Header(kind, rank)
        self._header_lock = threading.Lock()
        self._pool = pool or IOPool(settings.io_threads, settings.block_bytes)
        try:
            self._descriptor = open_nameless(settings.path)
            self._blocks = self._open_blocks()
            self.reserved_bytes = 0
            self.allocate(PAGE_BYTES)
            self._write_header()
        except OSError as error:
            raise storage_error(
                error, f"creating a file for {kind}", settings.path, rank
            ) from error

    def __del__(self) -> None:
        """Give the file back; mappings keep their own hold on it."""
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def _open_blocks(self) -> Blocks:
        if self._settings.backend == "kvikio":
            return KvikioBlocks(self._descriptor)
        return PosixBlocks(self._descriptor, self._settings.direct, self._calls)

    @property
    def descriptor(self) -> int:
        """The number of the open file, for mappings and ``/proc/PID/fd``."""
        return self._descriptor

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return self._blocks.direct

    def _write_header(self) -> None:
        """Also the first direct write: where it is refused, it is now that we learn it."""
        self._header_is_current = True
        page = Slab.of_host(PAGE_BYTES, pinned=False).lease(0, PAGE_BYTES)
        text = self._header.text()
        page[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._blocks.write(page, 0)

    # Space ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, dtypes: Mapping[torch.dtype, int] | None = None) -> int:
        """Reserve space; returns its first byte, which is a multiple of a page.

        Args:
            nbytes: how much.
            dtypes: bytes of each dtype that will be kept there, for the header.

        Raises:
            StorageError: when there is not enough.
        """
        offset, size = self.reserved_bytes, pages(nbytes)
        if size:
            try:
                self._calls.fallocate(self._descriptor, offset, size)
            except OSError as error:
                where = self._settings.path
                doing = f"reserving {size} bytes for {self._kind}"
                raise storage_error(error, doing, where, self._rank) from error
        self.reserved_bytes += size
        if dtypes:
            self._header.note(offset, size, dtypes)
            self._header_is_current = False
        return offset

    def private_window(
        self, offset: int, nbytes: int, on_return: Callable[[], None] | None = None
    ) -> PrivateWindow | None:
        """A window that tells what is written to it, where that is needed and can be known."""
        if nbytes == 0 or not (self.verifies and writes_show()):
            return None
        return PrivateWindow.of_file(self._descriptor, offset, nbytes, on_return)

    def window(
        self, offset: int, nbytes: int, on_return: Callable[[], None] | None = None
    ) -> Tensor:
        """``[nbytes]`` uint8 over the file. See [Note: windows]."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        slab = Slab.of_file(self._descriptor, offset, pages(nbytes))
        return slab.lease(0, nbytes, on_return)

    # Transfers --------------------------------------------------------------------------------

    def read(self, offset: int, target: Tensor) -> None:
        """Fill ``target`` (``[nbytes]`` uint8, on any device) from ``offset`` on.

        Raises:
            StorageError: naming the place.
        """
        self._transfer(offset, target, self._read_block)

    def write(self, offset: int, source: Tensor) -> None:
        """Write ``source`` (``[nbytes]`` uint8, on any device) from ``offset`` on.

        Raises:
            StorageError: naming the place.
        """
        if not self._header_is_current:  # written late: plans allocate many times
            with self._header_lock:
                self._guarded("writing the header of", 0, self._write_header)
        launched(source.device)()  # threads that move blocks follow no stream of this one
        self._transfer(offset, source, self._write_block)

    def _transfer(self, offset: int, tensor: Tensor, move: Callable[[int, Tensor], None]) -> None:
        assert offset % PAGE_BYTES == 0
        self._pool.run(move, list(self._parts(offset, tensor)))

    def _parts(self, offset: int, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        step = self._settings.block_bytes
        for start in range(0, tensor.numel(), step):
            yield offset + start, tensor[start : start + step]

    def _read_block(self, offset: int, target: Tensor) -> None:
        memory = target if self._is_ready(target) else self._pool.bounce(target.numel())
        self._guarded("reading", offset, lambda: self._blocks.read(memory, offset))
        if memory is not target:
            target.copy_(memory[: target.numel()])

    def _write_block(self, offset: int, source: Tensor) -> None:
        memory = source
        if not self._is_ready(source):
            memory = self._pool.bounce(source.numel())
            memory[: source.numel()].copy_(source)
        self._guarded("writing", offset, lambda: self._blocks.write(memory, offset))

    def _is_ready(self, tensor: Tensor) -> bool:
        """Whether the file system can move to and from this memory as it is."""
        if tensor.device.type != "cpu":
            return isinstance(self._blocks, KvikioBlocks)
        if not self._blocks.direct:
            return True
        return tensor.data_ptr() % PAGE_BYTES == 0 and tensor.numel() % PAGE_BYTES == 0

    def _guarded(self, doing: str, offset: int, action: Callable[[], None]) -> None:
        try:
            action()
        except StorageError:
            raise
        except OSError as error:
            what = f"{doing} {self._kind} at byte {offset}"
            raise storage_error(error, what, self._settings.path, self._rank) from error

    # Checksums --------------------------------------------------------------------------------

    def note_written(self, offset: int, source: Tensor) -> None:
        """Remember the checksum of a piece, where they are wanted."""
        if self.verifies:
            self._checksums[offset] = checksum(source)

    def check_read(self, offset: int, target: Tensor) -> None:
        """Compare a piece with what was written.

        Raises:
            CorruptedError: when they differ.
        """
        expected = self._checksums.get(offset)
        if expected is None or checksum(target) == expected:
            return
        raise self.corrupted(offset)

    def corrupted(self, offset: int) -> CorruptedError:
        """The error for a place that does not hold what was written there."""
        error = CorruptedError(
            f"rank {self._rank}: {self._kind} at byte {offset} below {self._settings.path} differs "
            "from the written data: the device or memory changed it, or code wrote to it outside "
            "of optimizer.step(). Resume from the last checkpoint."
        )
        error.errno = errno.EIO
        return error

    def check_written(self, offset: int, source: Tensor) -> None:
        """Read back what was just written, a block after another, where checksums are on.

        Raises:
            CorruptedError: when it differs from ``source``.
            StorageError: when it cannot be read.
        """
        if self.verifies:
            self._transfer(offset, source, self._compare_block)

    def _compare_block(self, offset: int, source: Tensor) -> None:
        memory = self._pool.bounce(source.numel())
        self._guarded("reading", offset, lambda: self._blocks.read(memory, offset))
        if not torch.equal(memory[: source.numel()], source.cpu()):
            raise self.corrupted(offset)

    @property
    def verifies(self) -> bool:
        """Whether what is read is compared with what was written (``DiskSettings.checksums``)."""
        return self._settings.checksums
