"""Where shards rest off the device, and how they get there for a gather."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.seams import ShardStorage
from polyshard_offload.shards.checksums import PartSums
from polyshard_offload.shards.gradients import GradientShelf, giver
from polyshard_offload.shards.norms import GradientNorms
from polyshard_offload.shards.staging import Staging, StagingCount
from polyshard_offload.shards.written import PrivateWindow
from polyshard_offload.tiers.host_memory import Arena, launched, typed
from polyshard_offload.tiers.swap_file import SwapFile


class Shelf(ShardStorage):
    """What both tiers share."""

    holds_gradients = True

    def __init__(
        self,
        device: torch.device,
        count: StagingCount,
        gradients: GradientShelf,
        prefetch_units: int,
    ) -> None:
        """Shards are computed with on ``device``."""
        self.prefetch_units = prefetch_units
        self.gradients = gradients
        self.norms = GradientNorms()
        self._device = device
        self._compute_device = device
        self._serves_codec = False
        self._count = count
        self._shard = torch.empty(0)
        self._staging: Staging | None = None

    @property
    def shard_bytes(self) -> int:
        """Bytes of the resting shard."""
        return self._shard.nbytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of staging that a gather needs."""
        return self.shard_bytes

    @override
    def serve_codec(self, enable: bool) -> None:
        """Have a codec read the shard on the host, so that only its payload moves from there."""
        self.release()
        self._staging = None
        self._serves_codec = enable
        self._device = torch.device("cpu") if enable else self._compute_device

    @override
    def rest(self, shard: Tensor) -> Tensor:
        """Take a shard over; a shard on the meta device has no values to keep yet."""
        self.release()
        self._shard = shard if shard.is_meta else self._keep(shard)
        self._staging = None
        return self._shard

    def _keep(self, shard: Tensor) -> Tensor:
        raise NotImplementedError

    def _stage(self) -> Staging:
        if self._staging is None:
            shard = self._shard
            self._staging = Staging(shard.numel(), shard.dtype, self._device, self._count)
        return self._staging

    @override
    def view(self) -> Tensor:
        return self._shard if self._shard.is_meta else self._stage().viewable()

    @override
    def release(self) -> None:
        if self._staging is not None:
            self._staging.release()

    @override
    def place_gradient(self, gradient: Tensor) -> Tensor:
        placed = self.gradients.place(gradient)
        self._count.gradient_moves += 1
        if self._count.records_norms:
            self.norms.record(gradient, placed)
        return placed

    @override
    def hold(self, parameters: Sequence[Tensor]) -> None:
        self.norms.hold(parameters, self._shard)


class HostShelf(Shelf):
    """A shard in host memory: page-locked beside an accelerator, in an arena always."""

    def __init__(
        self,
        arena: Arena,
        device: torch.device,
        count: StagingCount,
        gradients: GradientShelf,
        prefetch_units: int,
    ) -> None:
        """Shards rest in ``arena``."""
        on_host = device.type == "cpu"  # where a copy ahead of time hides behind nothing
        super().__init__(device, count, gradients, 0 if on_host else prefetch_units)
        self._wanted_units = self.prefetch_units
        self._arena = arena
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._on_the_way = False

    def _keep(self, shard: Tensor) -> Tensor:
        resting = typed(self._arena.take(shard.nbytes), shard.dtype)
        resting.copy_(shard)
        return resting

    @property
    def staged_bytes(self) -> int:
        """None for a codec, which reads the shard where it rests."""
        return 0 if self._serves_codec else self.shard_bytes

    @override
    def serve_codec(self, enable: bool) -> None:
        """A codec reads the shard itself: nothing is copied, and nothing ahead of time."""
        super().serve_codec(enable)
        self.prefetch_units = 0 if enable else self._wanted_units

    @override
    def view(self) -> Tensor:
        """What :meth:`fetch` fills, or for a codec the shard itself."""
        return self._shard if self._serves_codec else super().view()

    @override
    def prefetch(self) -> None:
        """Begin the copy on a stream of its own; without an accelerator there is none to hide."""
        if self._stream is not None and not (self._on_the_way or self._serves_codec):
            self._copy(self._stream)

    def _copy(self, stream: torch.Stream) -> None:
        staging = self._stage()
        staging.in_use()
        # The memory just taken may be in use by work launched before on the compute stream.
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            staging.tensor.copy_(self._shard, non_blocking=True)
        self._on_the_way = True

    @override
    def fetch(self) -> None:
        """Nothing moves for a codec, which reads the shard where it rests."""
        if self._serves_codec:
            return
        if self._stream is None:
            staging = self._stage()
            staging.in_use()
            staging.tensor.copy_(self._shard)
            return
        if not self._on_the_way:
            self._copy(self._stream)
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        self._on_the_way = False

    @override
    def release(self) -> None:
        """Give the staging back, after a copy nobody waited for has ended."""
        if self._on_the_way and self._stream is not None:
            self._stream.synchronize()
            self._on_the_way = False
        super().release()


class DiskShelf(Shelf):
    """A shard in a file. What others see of it is a window (see [Note: windows] of the swap file).

    The optimizer changes it through :meth:`open` and :meth:`close`, in host memory of its own.
    """

    def __init__(
        self,
        file: SwapFile,
        device: torch.device,
        count: StagingCount,
        gradients: GradientShelf,
        prefetch_units: int,
        bench_count: StagingCount,
    ) -> None:
        """Shards rest in ``file``; ``bench_count`` counts what the optimizer has opened."""
        super().__init__(device, count, gradients, prefetch_units)
        self._file = file
        self._bench_count = bench_count
        self._offset = 0
        self._free: dict[int, list[int]] = {}
        self._coming: Future[None] | None = None
        self._opening: Future[None] | None = None
        self._going: Future[None] | None = None
        self._bench: Staging | None = None
        self._sums = PartSums()
        self._window: PrivateWindow | None = None
        self._fresh: Tensor | None = None

    def _keep(self, shard: Tensor) -> Tensor:
        self._wait_written()
        self._fresh = shard if self._file.verifies else None
        # Gives its place back, unless somebody holds a window on it.
        self._shard, self._window = torch.empty(0), None
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
        """``parameters`` view the window; remember what they hold where checksums are on."""
        super().hold(parameters)
        fresh, self._fresh = self._fresh, None
        if self._file.verifies and not self._shard.is_meta:
            self._sums.hold(parameters, self._shard, None if fresh is None else fresh.cpu())

    def holds(self, address: int) -> bool:
        """Whether ``address`` is in the window."""
        start = self._shard.data_ptr()
        return start <= address < start + self._shard.nbytes

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

        return self._count.ahead.submit(read)

    def _put_back(self) -> None:
        """Have the file hold what people wrote to the window. See [Note: who may write]."""
        if self._window is None:
            if self._file.verifies:
                self._sums.forget(0, self._shard.numel())  # nobody knows what was written
            return
        size = self._shard.itemsize
        for start, stop in self._window.written():
            self._file.write(self._offset + start, self._window.memory[start:stop])
            self._window.give_up(start, stop)
            self._sums.forget(start // size, -(-stop // size))

    @override
    def fetch(self) -> None:
        """Wait for the read.

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
        start = self._sums.broken(shard) if self._file.verifies else None
        if start is not None:
            raise self._file.corrupted(self._offset + start * shard.itemsize)

    @override
    def release(self) -> None:
        """Give the staging back, after a read nobody waited for has ended."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.exception()
        super().release()

    # For the optimizer ------------------------------------------------------------------------

    def begin_open(self) -> None:
        """Read the shard into host memory of its own in another thread."""
        if self._bench is None:
            numel, dtype = self._shard.numel(), self._shard.dtype
            self._bench = Staging(numel, dtype, torch.device("cpu"), self._bench_count)
        if self._opening is None:
            self._bench.in_use()
            self._opening = self._read_later(self._bench)

    def open(self) -> Tensor:
        """The shard (``[shard_numel]``) in host memory, to be changed until :meth:`close`.

        Raises:
            StorageError: naming the place.
        """
        self.begin_open()
        opening, self._opening = self._opening, None
        assert opening is not None
        assert self._bench is not None
        opening.result()
        self._verify(self._bench.tensor)
        return self._bench.tensor

    def note_stepped(self, local: Tensor, stepped: Tensor) -> None:
        """A step left ``stepped`` for a parameter whose ``local`` is a part of the window."""
        if self._file.verifies and local.numel():
            start = (local.data_ptr() - self._shard.data_ptr()) // local.itemsize
            self._sums.note(start, stepped)

    def part(self, local: Tensor, opened: Tensor) -> Tensor:
        """What ``local``, a part of the window, is in the opened shard."""
        start = (local.data_ptr() - self._shard.data_ptr()) // local.itemsize
        return opened[start : start + local.numel()].view(local.shape)

    def close(self) -> None:
        """Write the opened shard behind the caller's back."""
        assert self._bench is not None
        bench = self._bench
        self._going = self._count.ahead.submit(self._file.write, self._offset, raw(bench.tensor))

    def finish(self) -> None:
        """Have everything written and the memory given back.

        Raises:
            StorageError: naming the place.
        """
        try:
            self._wait_written()
        finally:
            opening, self._opening = self._opening, None
            if opening is not None:
                opening.exception()
            if self._bench is not None:
                self._bench.release()

    def _wait_written(self) -> None:
        going, self._going = self._going, None
        if going is not None:
            going.result()


def raw(tensor: Tensor) -> Tensor:
    """A flat tensor as ``[nbytes]`` uint8."""
    return tensor.view(torch.uint8)
