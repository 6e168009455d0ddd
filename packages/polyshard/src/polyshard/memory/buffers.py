"""Memory whose aliases stay valid while it is given back and taken again.

[Note: stable storage]
Autograd saves views of unsharded parameters in forward and reads them in backward, after the memory
was freed and gathered anew. All those views share one ``StorageImpl``, so a buffer must keep it and
change only the memory behind it. Two ways:

* :class:`HeapBuffer` resizes the storage: the device's allocator frees and allocates. On an
  accelerator its caching allocator makes that cheap.
* :class:`MappedBuffer` (CPU on Linux, see ``pages``) keeps an address range for life
  and moves physical pages in and out, because fresh pages from the C allocator cost several times
  the transfer itself in page faults.

Code that reads or writes a released buffer (through a weight kept from a hook, or in a backward
that was told not to gather what it needs) must get an error. On a resized storage, which has no
memory, torch raises or faults depending on the operation; a range of addresses would quietly show
zeros or what it held before. So both are closed: torch then raises when asked for their memory.

Writes into a buffer go through its own base tensor. Parameters are built with ``set_`` and so have
a version counter of their own: refilling never trips autograd's check on saved tensors.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from polyshard._torch.private import (
    StorageGate,
    gates_work,
    storage_holders,
    storages_are_held,
)
from polyshard.memory.pages import PagePool, PageRange
from polyshard.memory.streams import streams_of


class Buffer(Protocol):
    """A 1-D tensor whose memory comes and goes."""

    tensor: Tensor
    """``[numel]``; readable and writable only while acquired."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes while acquired."""
        ...

    def acquire(self) -> None:
        """Back the buffer with memory; contents are undefined. A no-op when acquired."""
        ...

    def release(self) -> None:
        """Give the memory back. A no-op when not acquired."""
        ...


class HeapBuffer:
    """A buffer that allocates and frees through the device's allocator."""

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, is_shown: bool = True
    ) -> None:
        """Reserve nothing yet; the storage starts at its full size so that views can be built.

        ``is_shown``: whether others than its owner may hold views of it.
        """
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self._gate = StorageGate(self._storage) if is_shown else None
        self._acquired = True

    def acquire(self) -> None:
        """Allocate."""
        if not self._acquired:
            if self._gate is not None:
                self._gate.open()
            self._storage.resize_(self.nbytes)
            self._acquired = True

    def release(self) -> None:
        """Free."""
        if self._acquired:
            self._storage.resize_(0)
            if self._gate is not None:
                self._gate.close()
            self._acquired = False


class MappedBuffer:
    """A buffer at a fixed address whose pages come from a pool shared by many."""

    def __init__(self, numel: int, dtype: torch.dtype, pool: PagePool) -> None:
        """Reserve an address range; no memory is used until :meth:`acquire`."""
        self.nbytes = numel * dtype.itemsize
        self._pool = pool
        self._range = PageRange(self.nbytes)
        self.tensor = self._range.tensor(numel, dtype)
        self._gate = StorageGate(self.tensor.untyped_storage())
        self._acquired = False

    def acquire(self) -> None:
        """Move pages in."""
        if not self._acquired:
            self._pool.fill(self._range)
            self._gate.open()
            self._acquired = True

    def release(self) -> None:
        """Leave the pages to the next buffer that needs some."""
        if self._acquired:
            self._gate.close()
            self._pool.offer(self._range)
            self._acquired = False


class FixedBuffer:
    """A buffer that is always there: memory of another owner, such as a shard at world size 1."""

    def __init__(self, tensor: Tensor) -> None:
        """Wrap ``tensor`` (1-D)."""
        self.tensor = tensor
        self.nbytes = 0

    def acquire(self) -> None:
        """Nothing to do."""

    def release(self) -> None:
        """Nothing to do."""


MAPPED_BYTES = 1 << 20
"""Buffers below this many bytes come from the heap: they fit its free lists and cost no faults."""


def new_buffer(
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    pool: PagePool | None,
    *,
    is_shown: bool = True,
) -> Buffer:
    """The kind of buffer that suits ``device``.

    ``is_shown``: whether others than its owner may hold views of it, which are to raise whenever
    the memory is gone.
    """
    large = numel * dtype.itemsize >= MAPPED_BYTES
    if device.type == "cpu" and pool is not None and large and gates_work():
        return MappedBuffer(numel, dtype, pool)
    return HeapBuffer(numel, dtype, device, is_shown=is_shown)


class Recycled:
    """Memory handed out again when no tensor of the last time is held any more.

    Sharded gradients live from one backward to ``zero_grad``; taken afresh in every step they cost
    more in page faults than in arithmetic. A gradient that is kept longer keeps its memory: then
    new memory is taken instead. Large memory is made of pages that backward has freed, and gives
    them back to the next forward.

    Accelerators have allocators that recycle for all: there, nothing is kept after ``zero_grad``.
    """

    def __init__(self, pool: PagePool | None = None) -> None:
        self._pool = pool
        self._memory: Tensor | None = None
        self._kind: object = None
        self._address = 0
        self._mapped: MappedBuffer | None = None
        self._is_resting = False
        self._parts: dict[int, Tensor] = {}
        self._storages: tuple[int, list[torch.UntypedStorage]] = (0, [])

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``[numel]``, contents undefined; an alias, so that holders can be counted."""
        if streams_of(device) is not None:
            self.drop()
            return torch.empty(numel, dtype=dtype, device=device)
        memory = self._memory
        kind = (numel, dtype, device)
        if memory is None or kind != self._kind or not (self._is_resting or self._is_free(memory)):
            memory = self._renew(numel, dtype, device)
            self._kind = kind
        elif self._is_resting:
            assert self._mapped is not None
            self._mapped.acquire()
        self._is_resting = False
        return memory.view(-1)

    def _renew(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.drop()
        buffer = new_buffer(numel, dtype, device, self._pool)
        buffer.acquire()
        # Parts keep addresses, which a buffer on the heap does not: that one never rests.
        if self._pool is not None and isinstance(buffer, MappedBuffer):
            self._mapped = buffer
            self._pool.borrowers.add(self)
        self._memory, self._address = buffer.tensor, buffer.tensor.data_ptr()
        return buffer.tensor

    def rest(self) -> None:
        """Let others have the pages meanwhile, if nothing that was handed out is held."""
        memory, mapped = self._memory, self._mapped
        if mapped is None or memory is None or self._is_resting or not self._is_free(memory):
            return
        mapped.release()
        self._is_resting = True

    def parts_of(self, value: Tensor) -> dict[int, Tensor]:
        """What was cut from ``value`` before, to be added to; empty if it lives elsewhere.

        A part (in a storage of its own) may be handed out as an alias, so that its holders count.
        """
        lives_here = self._memory is not None and self._address == value.data_ptr()
        return self._parts if lives_here else {}

    def keep_only_if_used_by(self, value: Tensor) -> None:
        """Give the memory up unless ``value`` lives in it: then keeping it costs nothing."""
        if self._memory is not None and self._address != value.data_ptr():
            self.drop()

    def drop(self) -> None:
        """Give the memory up; tensors that are held keep it alive."""
        if self._mapped is not None:
            self.rest()
        self._memory = self._mapped = None
        self._is_resting = False
        self._forget_parts()

    def _forget_parts(self) -> None:
        self._parts, self._storages = {}, (0, [])

    def _is_free(self, memory: Tensor) -> bool:
        """Whether nothing but this holds ``memory`` or parts of it."""
        if self._storages[0] != len(self._parts):  # made once: they are asked in every step
            made = [part.untyped_storage() for part in self._parts.values() if part.numel()]
            self._storages = (len(self._parts), made)
        parts = self._storages[1]
        return storage_holders(memory) == 1 + len(parts) and not storages_are_held(parts)
