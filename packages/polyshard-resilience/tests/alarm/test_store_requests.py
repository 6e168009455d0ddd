"""What watching costs the store: as many requests a rank, however many ranks there are."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch.distributed as dist
from toy_store import CountingStore

from polyshard.agreement.board import Board
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.courier import Courier, Request
from polyshard_resilience.alarm.processes import Process
from polyshard_resilience.alarm.register import Register
from polyshard_resilience.alarm.watch import Watch
from polyshard_resilience.rollback import verdict
from polyshard_resilience.rollback.verdict import DONE, READY, Ballot

SIZES = (1024, 4096, 16384)
ON_A_HOST = 8
SECONDS = 1.5


class AtOnce(Courier):
    """Makes requests in the thread that asks."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def tell(self, request: Request[Any]) -> Any:
        request(self.store)

    def ask(self, request: Request[Any], seconds: float) -> Any:
        return request(self.store)


def job(size: int, monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    """A store that all ranks but the first have told which processes they are, on many hosts."""
    store: Any = CountingStore()
    own, ranks = Process.own(), tuple(range(size))
    for rank in ranks[1:]:
        host = own.host if rank < ON_A_HOST else f"host {rank // ON_A_HOST}"
        process = replace(own, host=host)
        with monkeypatch.context() as patch:
            patch.setattr(Process, "own", lambda process=process: process)
            Register(Board(store, "alarm", rank, ranks), AtOnce(store)).enter()
    store.is_counting = True
    return cast("CountingStore", store)


@contextmanager
def watched(store: Any, size: int) -> Iterator[Alarm]:
    alarm = Alarm(Board(store, "alarm", 0, tuple(range(size))))
    watch = Watch(alarm)
    alarm.start()
    watch.start()
    yield alarm
    watch.close(5.0)
    alarm.courier.close(5.0)


class WaitsForAll:
    """For ranks that are slow."""

    def __init__(self, size: int) -> None:
        self.ranks = tuple(range(size))

    def peers(self) -> tuple[int, ...]:
        return self.ranks

    def place(self) -> tuple[int, str, int]:
        return -1, "ballot", 1


@pytest.mark.sampled(2)  # the least and the most
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_starts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = job(size, monkeypatch)
    with watched(store, size):
        time.sleep(SECONDS)
    print(f"start: {size} ranks, {store.counts.total()} requests")
    assert store.counts.total() < 60


@pytest.mark.sampled(2)  # the least and the most
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_waits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a transfer, a vote or a first forward: it looks at those in its sight alone."""
    store = job(size, monkeypatch)
    with watched(store, size) as alarm:
        time.sleep(SECONDS)
        before = store.counts.total()
        alarm.waiting = WaitsForAll(size)
        time.sleep(SECONDS)
        alarm.waiting = None
    print(f"wait: {size} ranks, {store.counts.total() - before} requests")
    assert store.counts.total() - before < 60


def test_records_of_a_host_are_read_once() -> None:
    """What was read is not decoded again, and the list may grow meanwhile."""
    store: Any = dist.HashStore()
    registers = [Register(Board(store, "alarm", r, (0, 1, 2)), AtOnce(store)) for r in range(3)]
    for count, register in enumerate(registers, 1):
        register.enter()
        registers[0].read_host()
        assert len(registers[0].known) == count
    assert json.loads(registers[0].known[2].encode()) == json.loads(Process.own().encode())


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
