"""Shards in a file: read for gathers, opened in host memory for the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from weakref import WeakSet

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.memory.streams import launched
from polyshard_offload.shards.checksums import ParameterChecksums
from polyshard_offload.shards.gradients import GradientStorage, giver
from polyshard_offload.shards.staging import Staging, StagingState
from polyshard_offload.shards.storage import TierStorage
from polyshard_offload.tiers.host_memory import typed
from polyshard_offload.tiers.private_window import PrivateWindow
from polyshard_offload.tiers.swap_file import SwapFile


class DiskStorage(TierStorage):
    """A shard in a file. What others see of it is a window (see [Note: windows] of the swap file).

    Optimizers change it through :meth:`open` and :meth:`close`, in host memory of its own. Several
    that step in backward may have it open at once: they share that memory, which is written once
    the last of them has closed it.
    """

    def __init__(
        self,
        file: SwapFile,
        device: torch.device,
        staging: StagingState,
        gradients: GradientStorage,
        prefetch_units: int,
        step_staging: StagingState,
    ) -> None:
        """Shards rest in ``file``; ``step_staging`` counts what the optimizer has opened."""
        super().__init__(device, staging, gradients)
        self.prefetch_units = prefetch_units
        self._file = file
        self._step_staging = step_staging
        self._offset = 0
        self._free: dict[int, list[int]] = {}
        self._coming: Future[None] | None = None
        self._opening: Future[None] | None = None
        self._going: Future[None] | None = None
        self._opened: Staging | None = None
        self._users: WeakSet[object] = WeakSet()
        self._checksums = ParameterChecksums()
        self._window: PrivateWindow | None = None
        self._fresh: Tensor | None = None

    @override
    def rest(self, shard: Tensor) -> Tensor:
        self.finish()
        self._opened = None  # its size and dtype may not be those of what comes
        return super().rest(shard)

    def _keep(self, shard: Tensor) -> Tensor:
        self._fresh = shard if self._file.verifies else None
        # Gives its place back, unless a window on it is held.
        self._shard, self._window = torch.empty(0, device="cpu"), None
        nbytes = shard.nbytes
        free = self._free.setdefault(nbytes, [])
        self._offset = free.pop() if free else self._file.allocate(nbytes, {shard.dtype: nbytes})
        self._file.write(self._offset, raw(shard))
        self._window = self._file.private_window(self._offset, nbytes, giver(free, self._offset))
        if self._window is not None:
            return typed(self._window.memory[:nbytes], shard.dtype)
        back = giver(free, self._offset)
        return typed(self._file.window(self._offset, nbytes, back), shard.dtype)

    @override
    def hold(self, parameters: Sequence[Tensor]) -> None:
        super().hold(parameters)
        fresh, self._fresh = self._fresh, None
        if self._file.verifies and not self._shard.is_meta:
            self._checksums.hold(parameters, self._shard, None if fresh is None else fresh.cpu())

    def holds(self, address: int) -> bool:
        """Whether ``address`` is in the window.

        A shard on the meta device has none: all tensors there, and empty ones, have address 0.
        """
        start = self._shard.data_ptr()
        return not self._shard.is_meta and start <= address < start + self._shard.nbytes

    # For gathers ------------------------------------------------------------------------------

    @override
    def prefetch(self) -> None:
        if self._coming is None:
            staging = self._stage()
            staging.in_use()
            self._coming = self._read_later(staging)

    def _read_later(self, staging: Staging) -> Future[None]:
        self._wait_written()
        self._put_back()
        # The memory just taken may be in use by work launched before; other threads have other
        # streams, and a disk that writes to a device follows none.
        idle = launched(staging.tensor.device)

        def read() -> None:
            idle()
            self._file.read(self._offset, raw(staging.tensor))

        return self._staging_state.ahead.submit(read)

    def _put_back(self) -> None:
        """Have the file hold what the user wrote to the window. See [Note: who may write]."""
        if self._window is None:
            if self._file.verifies:
                self._checksums.forget(0, self._shard.numel())  # what was written is not known
            return
        size = self._shard.itemsize
        for start, stop in self._window.written():
            self._file.write(self._offset + start, self._window.memory[start:stop])
            self._window.give_up(start, stop)
            self._checksums.forget(start // size, -(-stop // size))

    @override
    def fetch(self) -> None:
        """Have the shard on the device.

        Raises:
            StorageError: naming the place.
        """
        self.prefetch()
        coming, self._coming = self._coming, None
        assert coming is not None
        coming.result()
        self._verify(self._stage().tensor)

    def _verify(self, shard: Tensor) -> None:
        """Compare what was read with what steps left, where checksums are on.

        Raises:
            CorruptedError: naming the place.
        """
        start = self._checksums.broken(shard) if self._file.verifies else None
        if start is not None:
            raise self._file.corrupted(self._offset + start * shard.itemsize)

    @override
    def release(self) -> None:
        # A read that was not waited for must end before its memory goes.
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.exception()
        super().release()

    # For the optimizer ------------------------------------------------------------------------

    def begin_open(self) -> None:
        """Read the shard into host memory of its own in another thread, unless it is open."""
        if self._users:
            return
        if self._opened is None:
            numel, dtype = self._shard.numel(), self._shard.dtype
            self._opened = Staging(numel, dtype, torch.device("cpu"), self._step_staging)
        if self._opening is None:
            self._opened.in_use()
            self._opening = self._read_later(self._opened)

    def open(self, user: object) -> Tensor:
        """The shard (``[shard_numel]``) in host memory, to be changed until :meth:`close`.

        The file is not read while another ``user`` has the shard open: it is older than what that
        one has made of the shard.

        Raises:
            StorageError: naming the place.
        """
        self.begin_open()
        assert self._opened is not None
        if not self._users:
            opening, self._opening = self._opening, None
            assert opening is not None
            opening.result()
            self._verify(self._opened.tensor)
        self._users.add(user)
        return self._opened.tensor

    def note_stepped(self, local: Tensor, stepped: Tensor) -> None:
        """A step left ``stepped`` for a parameter whose ``local`` is a part of the window."""
        if self._file.verifies and local.numel():
            start = (local.data_ptr() - self._shard.data_ptr()) // local.itemsize
            self._checksums.note(start, stepped)

    def part(self, local: Tensor, opened: Tensor) -> Tensor:
        """What ``local``, a part of the window, is in the opened shard."""
        start = (local.data_ptr() - self._shard.data_ptr()) // local.itemsize
        return opened[start : start + local.numel()].view(local.shape)

    def close(self, user: object) -> None:
        """Write the opened shard behind the caller's back, unless others have it open still."""
        self.drop(user)
        if self._users:
            return
        assert self._opened is not None
        source = raw(self._opened.tensor)
        self._going = self._staging_state.ahead.submit(self._file.write, self._offset, source)

    def drop(self, user: object) -> None:
        """As :meth:`close`, without writing, if it is open: the way out of an error."""
        self._users.discard(user)

    def finish(self) -> None:
        """Have everything written and the memory given back, unless others have it open still.

        Raises:
            StorageError: naming the place.
        """
        try:
            self._wait_written()
        finally:
            if not self._users:
                self._give_back()

    def _give_back(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.exception()
        if self._opened is not None:
            self._opened.release()

    def _wait_written(self) -> None:
        going, self._going = self._going, None
        if going is not None:
            going.result()


def raw(tensor: Tensor) -> Tensor:
    """A flat tensor as ``[nbytes]`` uint8."""
    return tensor.view(torch.uint8)
