"""Shards on disk that a step has in memory: one is changed, one is read, one is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from torch import Tensor

from polyshard_offload.optimizer.chunks import Chunk
from polyshard_offload.shards.disk_storage import DiskStorage

OPEN_SHARDS = 3


class OpenShards:
    """Opens the shard of each chunk in turn; one that several chunks share stays open."""

    def __init__(self) -> None:
        self._current: tuple[DiskStorage, Tensor] | None = None
        self._closing: DiskStorage | None = None

    def open(self, chunks: Sequence[Chunk], index: int) -> Tensor | None:
        """The shard with the parameters of chunk ``index``; the one needed next is begun.

        ``None`` where they rest on no disk. Such a chunk may come between two of one shard, which
        then stays open: closed, it would be changed again while it is written.

        Raises:
            StorageError: when reading, or writing an earlier one, fails.
        """
        storage = chunks[index].storage
        if self._current is not None and self._current[0] is storage:
            return self._current[1]
        if storage is None:
            return None
        self._close_current()
        self._current = (storage, storage.open(self))
        following = (c.storage for c in chunks[index:] if c.storage not in (None, storage))
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
        self._closing.close(self)

    def close(self) -> None:
        """Have everything written.

        Raises:
            StorageError: when that fails.
        """
        self._close_current()
        if self._closing is not None:
            self._closing.finish()
            self._closing = None

    def abandon(self, storages: Iterable[DiskStorage]) -> None:
        """Let go of what is open without writing it: the way out of an error."""
        current = () if self._current is None else (self._current[0],)
        for storage in {*storages, *current}:
            storage.drop(self)
            with suppress(Exception):
                storage.finish()
        self._current = self._closing = None
