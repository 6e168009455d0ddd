"""Where records of optimizer state rest: on the host or on disk, behind one interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from polyshard_offload.tiers.host_memory import Arena, pages
from polyshard_offload.tiers.swap_file import SwapFile


@dataclass(frozen=True)
class Extent:
    """A page-aligned piece of a store; offsets and sizes are in bytes."""

    offset: int
    nbytes: int


class Store(Protocol):
    """Keeps the records of optimizer state, each in an extent of its own."""

    def allocate(self, nbytes: int, dtypes: Mapping[torch.dtype, int] | None = None) -> Extent:
        """Room for ``nbytes``, rounded up to whole pages; ``dtypes`` says bytes of each dtype.

        Raises:
            StorageError: when there is not enough space.
        """
        ...

    def window(self, extent: Extent) -> Tensor:
        """``[nbytes]`` uint8 on the host that shows, and changes, what is kept."""
        ...

    def release(self, extent: Extent) -> None:
        """Use ``extent`` for something else once no window on it is left."""
        ...

    def load(self, extents: Sequence[Extent], target: Tensor) -> None:
        """Fill ``target`` with the extents, one after another. Runs in any thread.

        Raises:
            StorageError: when reading fails, or what was read is not what was written.
        """
        ...

    def save(self, extents: Sequence[Extent], source: Tensor) -> None:
        """Keep what ``source`` holds for the extents, one after another. Runs in any thread.

        Raises:
            StorageError: when writing fails.
        """
        ...


def slices(extents: Sequence[Extent], buffer: Tensor) -> Iterator[tuple[Extent, Tensor]]:
    """Each extent with its part of a packed buffer."""
    start = 0
    for extent in extents:
        yield extent, buffer[start : start + extent.nbytes]
        start += extent.nbytes


def merged(extents: Sequence[Extent]) -> list[Extent]:
    """Extents that follow each other as one, so that many small records are one transfer."""
    found: list[Extent] = []
    for extent in extents:
        if found and found[-1].offset + found[-1].nbytes == extent.offset:
            found[-1] = Extent(found[-1].offset, found[-1].nbytes + extent.nbytes)
        elif extent.nbytes:
            found.append(extent)
    return found


class HostStore(Store):
    """Extents in host memory."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._kept: dict[int, Tensor] = {}
        self._next = 0

    @override
    def allocate(self, nbytes: int, dtypes: Mapping[torch.dtype, int] | None = None) -> Extent:
        del dtypes
        extent = Extent(self._next, pages(nbytes))
        self._next += extent.nbytes
        if extent.nbytes:  # an empty extent shares its offset with the one after it
            self._kept[extent.offset] = self._arena.take(extent.nbytes)
        return extent

    @override
    def window(self, extent: Extent) -> Tensor:
        return (
            self._kept[extent.offset]
            if extent.nbytes
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )

    @override
    def release(self, extent: Extent) -> None:
        self._kept.pop(extent.offset, None)

    @override
    def load(self, extents: Sequence[Extent], target: Tensor) -> None:
        for extent, part in slices(extents, target):
            part.copy_(self.window(extent))

    @override
    def save(self, extents: Sequence[Extent], source: Tensor) -> None:
        for extent, part in slices(extents, source):
            self.window(extent).copy_(part)


@dataclass
class _Released:
    """Extents of a swap file that are not needed any more: free when no window is left on them."""

    windows: Counter[Extent] = field(default_factory=Counter)
    waiting: set[Extent] = field(default_factory=set)
    free: dict[int, list[Extent]] = field(default_factory=dict)

    def taken(self, nbytes: int) -> Extent | None:
        found = self.free.get(nbytes)
        return found.pop() if found else None

    def opened(self, extent: Extent) -> Callable[[], None]:
        """A window was made; call what is returned when it is gone."""
        self.windows[extent] += 1

        def closed() -> None:
            self.windows[extent] -= 1
            self.settle(extent)

        return closed

    def settle(self, extent: Extent) -> None:
        if extent in self.waiting and not self.windows[extent]:
            self.waiting.remove(extent)
            self.free.setdefault(extent.nbytes, []).append(extent)


class DiskStore(Store):
    """Extents in a swap file."""

    def __init__(self, file: SwapFile) -> None:
        self._file = file
        self._released = _Released()

    @override
    def allocate(self, nbytes: int, dtypes: Mapping[torch.dtype, int] | None = None) -> Extent:
        again = self._released.taken(pages(nbytes))
        return again or Extent(self._file.allocate(nbytes, dtypes), pages(nbytes))

    @override
    def window(self, extent: Extent) -> Tensor:
        closed = self._released.opened(extent) if extent.nbytes else None
        return self._file.window(extent.offset, extent.nbytes, closed)

    @override
    def release(self, extent: Extent) -> None:
        if extent.nbytes:
            self._released.waiting.add(extent)
            self._released.settle(extent)

    @override
    def load(self, extents: Sequence[Extent], target: Tensor) -> None:
        for extent, part in slices(merged(extents), target):
            self._file.read(extent.offset, part)
        for extent, part in slices(extents, target):
            self._file.check_read(extent.offset, part)

    @override
    def save(self, extents: Sequence[Extent], source: Tensor) -> None:
        for extent, part in slices(extents, source):
            self._file.note_written(extent.offset, part)
        for extent, part in slices(merged(extents), source):
            self._file.write(extent.offset, part)
