"""Shards on disk that a step has in memory: one is changed, one is read, one is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from torch import Tensor

from polyshard_offload.optimizer.chunks import Chunk
from polyshard_offload.shards.storage import DiskShelf

OPENED_SHELVES = 3


class OpenedShelves:
    """Opens the shelf of each chunk in turn. One that several chunks share stays open."""

    def __init__(self) -> None:
        """Nothing is open."""
        self._current: tuple[DiskShelf, Tensor] | None = None
        self._closing: DiskShelf | None = None

    def open(self, chunks: Sequence[Chunk], index: int) -> Tensor | None:
        """The shard with the parameters of chunk ``index``; the one needed next is begun.

        ``None`` where they rest on no disk. Such a chunk may come between two of one shelf, which
        then stays open: closed, it would be changed again while it is written.

        Raises:
            StorageError: when reading, or writing an earlier one, fails.
        """
        shelf = chunks[index].shelf
        if self._current is not None and self._current[0] is shelf:
            return self._current[1]
        if shelf is None:
            return None
        self._close_current()
        self._current = (shelf, shelf.open())
        following = (c.shelf for c in chunks[index:] if c.shelf not in (None, shelf))
        upcoming = next(following, None)
        if upcoming is not None:
            upcoming.begin_open()
        return self._current[1]

    def _close_current(self) -> None:
        if self._current is None:
            return
        if self._closing is not None:
            self._closing.finish()
        self._closing, self._current = self._current[0], None
        self._closing.close()

    def close(self) -> None:
        """Have everything written.

        Raises:
            StorageError: when that fails.
        """
        self._close_current()
        if self._closing is not None:
            self._closing.finish()
            self._closing = None

    def abandon(self, shelves: Iterable[DiskShelf]) -> None:
        """Let go of what is open without writing it: the way out of an error."""
        for shelf in shelves:
            with suppress(Exception):
                shelf.finish()
        self._current = self._closing = None
