"""Connections of gloo that are made apart from process groups, and cut."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from polyshard._torch.private import default_store
from polyshard_resilience._torch_private import connect_gloo, cut_gloo, forget_gloo, own_client
from polyshard_testing import ranks


def connected(name: str, rank: int, size: int) -> dist.ProcessGroup:
    store = default_store()
    assert store is not None
    return connect_gloo(store, f"test/{name}", rank, size, timedelta(seconds=30))


@ranks(3)
def test_a_cut_ends_all_waits_here_and_there(rank: int, size: int) -> None:
    """Also between ranks that did not cut: each does, when it is let down."""
    connections = connected("cut", rank, size)
    values = torch.ones(4)
    connections.allreduce([values]).wait()
    assert values.tolist() == [3.0] * 4
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        threading.Timer(0.2, cut_gloo, [connections]).start()
    source = {0: 1, 1: 0, 2: 0}[rank]
    with pytest.raises(RuntimeError):
        connections.recv([torch.empty(1)], source, 5).wait()
    cut_gloo(connections)
    with pytest.raises(RuntimeError):
        connections.recv([torch.empty(1)], (rank + 1) % size, 5).wait()
    assert time.monotonic() - begin < 10
    total = torch.ones(1)  # the process group is what it was
    dist.all_reduce(total)
    assert total.item() == size
    again = connected("again", rank, size)
    again.allreduce([values]).wait()
    assert values.tolist() == [9.0] * 4


def test_a_client_of_its_own() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    prefixed = dist.PrefixStore("some", server)
    other = own_client(prefixed)
    assert other is not prefixed
    other.set("key", "value")
    assert prefixed.get("key") == b"value"
    shared = dist.HashStore()
    assert own_client(shared) is shared


@ranks(2)
def test_nothing_is_left_in_the_store(rank: int, size: int) -> None:
    store = default_store()
    assert store is not None
    keys = [f"test/left/0/{each}" for each in range(size)]
    assert not store.check([keys[0]])
    dist.barrier()  # no rank connects before all have looked
    connections = connected("left", rank, size)
    assert store.check(keys)
    connections.allreduce([torch.ones(1)]).wait()
    dist.barrier()
    forget_gloo(store, "test/left", rank)
    dist.barrier()
    assert not any(store.check([key]) for key in keys)
