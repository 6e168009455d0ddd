"""Where ranks leave short texts for each other: the key-value store of the process group.

Nothing here is a collective, and nothing waits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from polyshard._torch.private import default_store

REQUESTS_PER_SECOND = 4000
"""What all ranks together may ask of the store while they wait."""


@dataclass(frozen=True)
class Board:
    """The part of the store that belongs to one set of ranks."""

    store: dist.Store
    prefix: str
    rank: int
    ranks: tuple[int, ...]

    def key(self, kind: str, rank: int) -> str:
        """Where ``rank`` leaves its ``kind`` of news."""
        return f"{self.prefix}/{kind}/{rank}"

    def post(self, kind: str, text: str) -> None:
        """Publish for the others; an empty text takes back what was there."""
        self.store.set(self.key(kind, self.rank), text)

    def read(self, kind: str, rank: int) -> str | None:
        """What ``rank`` published and did not take back, or ``None``; never waits."""
        return self.look(self.key(kind, rank)) or None

    def look(self, key: str) -> str | None:
        """What is under ``key``, if anything; never waits."""
        return look(self.store, key)

    def part(self, name: object) -> Board:
        """A board of the same ranks below this one."""
        return replace(self, prefix=f"{self.prefix}/{name}")


def open_board(ranks: Sequence[int]) -> Board | None:
    """The board of ``ranks``; ``None`` without a store shared by real processes."""
    store = default_store() if dist.is_initialized() else None
    if store is None or "fake" in dist.get_backend_config():
        return None
    prefix = f"polyshard/{zlib.crc32(repr(tuple(ranks)).encode()):08x}"
    return Board(store, prefix, dist.get_rank(), tuple(ranks))


def look(store: dist.Store, key: str) -> str | None:
    """What is under ``key`` of ``store``, if anything; never waits."""
    return store.get(key).decode() if store.check([key]) else None


def said_of(error: BaseException) -> str:
    """``error`` in one text, with the notes that say which plugin and hook it came from."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"
