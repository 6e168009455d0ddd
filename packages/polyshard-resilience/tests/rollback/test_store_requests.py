"""What a vote costs the store: as many requests a rank, however many ranks there are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from toy_store import CountingStore

from polyshard.alarm.board import Board
from polyshard_resilience.rollback import verdict
from polyshard_resilience.rollback.verdict import DONE, READY, Ballot

SIZES = (1024, 4096, 16384)


def come(store: Any, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> Ballot:
    board = Board(store, "job", rank, tuple(range(size)))
    monkeypatch.setattr(verdict, "open_board", lambda ranks: board)
    return Ballot(range(size), 0)


@pytest.mark.parametrize("size", SIZES)
def test_a_step_of_an_attempt(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that comes first, and waits for the last for a moment: both votes."""
    store: Any = CountingStore()
    for name in (READY, DONE):
        store.set(f"job/attempts/1/{name}/come", "")
        store.delete_key(f"job/attempts/1/{name}/come")
    first = come(store, 0, size, monkeypatch)
    last = come(store, 1, size, monkeypatch)
    store.is_counting = True
    for name in (READY, DONE):
        for _ in range(2, size):
            store.inner.add(f"job/attempts/1/{name}/come", 1)
        thread = threading.Timer(0.12, last.cast, (name, None))
        thread.start()
        assert first.cast(name, None)
        thread.join()
    print(f"attempt: {size} ranks, {store.counts.total()} requests of two")
    assert store.counts.total() < 50
