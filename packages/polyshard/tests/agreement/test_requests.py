"""What meeting costs the store: a few requests a rank, however many ranks there are."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from polyshard.agreement import meeting
from polyshard.agreement.board import Board
from polyshard.agreement.meeting import meet, report_failure
from polyshard.errors import PlanMismatchError

SIZES = (4, 64, pytest.param(1024, marks=pytest.mark.thorough))


class CountingStore:
    """Counts requests by the last part of the key; who waits asks for some again and again."""

    POLLED = ("ended", "verdict", "leads", "reports")

    def __init__(self) -> None:
        self.inner = dist.HashStore()
        self.inner.set_timeout(timedelta(seconds=60))
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    @property
    def timeout(self) -> timedelta:
        return self.inner.timeout  # type: ignore[attr-defined, no-any-return]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.inner, name)

        def counted(key: str | list[str], *args: Any) -> Any:
            last = (key if isinstance(key, str) else key[0]).rpartition("/")[2]
            with self.lock:
                self.counts["polls" if last in self.POLLED else "requests"] += 1
            return method(key, *args)

        return counted


def come(size: int, lines: Callable[[int], Sequence[str]]) -> tuple[CountingStore, list[str]]:
    """All ranks meet, each in a thread; what they were told."""
    store = CountingStore()
    boards = [Board(cast("dist.Store", store), "table", r, tuple(range(size))) for r in range(size)]
    told = [""] * size

    def act(rank: int) -> None:
        try:
            meet(boards[rank], lines(rank))
        except PlanMismatchError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return store, told


@pytest.mark.parametrize("size", SIZES)
def test_equal_plans(size: int) -> None:
    store, told = come(size, lambda rank: ["a"])
    assert told == [""] * size
    assert store.counts["requests"] <= 8 * size


@pytest.mark.parametrize("size", SIZES)
def test_different_plans(size: int) -> None:
    """One rank reads what all came with; the others read what it found."""
    store, told = come(size, lambda rank: ["same", "b" if rank == 2 else "a"])
    assert set(told) == {
        "ranks planned different things; nothing was communicated yet.\n"
        "rank 0 (-) against ranks [2] (+):\n-a\n+b\n"
        "Pass the same model, mesh, policies and plugins on every rank."
    }
    assert store.counts["requests"] <= 16 * size


@pytest.mark.parametrize("size", SIZES[:2])
def test_a_rank_that_failed(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of those who wait looks for reports."""
    store = CountingStore()
    ranks = tuple(range(size))
    boards = [Board(cast("dist.Store", store), "table", rank, ranks) for rank in ranks]
    monkeypatch.setattr(meeting, "open_board", lambda ranks: boards[-1])
    report_failure(lambda: [ranks], OSError("no room"))
    told: list[str] = []

    def act(rank: int) -> None:
        with pytest.raises(PlanMismatchError) as caught:
            meet(boards[rank], ["a"])
        told.append(str(caught.value))

    threads = [threading.Thread(target=act, args=(rank,)) for rank in ranks[:-1]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == [f"rank {size - 1} failed while planning: OSError: no room"] * (size - 1)
    looks = meeting.GRACE_SECONDS / meeting.LOOK_SECONDS + 2
    assert store.counts["requests"] <= (12 + 3 * looks) * size
