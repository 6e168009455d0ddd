"""When ``enable()`` may be called."""

from __future__ import annotations

import socket
import threading
from unittest import mock

import pytest
import torch.distributed as dist
from toy_models import build

import polyshard
import polyshard_resilience
from polyshard import failures
from polyshard.agreement import board
from polyshard.agreement.meeting import agree
from polyshard.errors import LifecycleError
from polyshard_resilience.alarm import current
from polyshard_testing import ranks


@ranks(2)
def test_until_something_is_sharded(rank: int, size: int) -> None:
    """What agreed before, as ``TensorParallel.apply`` does, keeps no handler."""
    with mock.patch.object(failures, "_registry", return_value=failures._Registry()):
        agree(range(size), ["a plan of tensor parallelism"])
        polyshard_resilience.enable()
        assert failures.failure_handler().name == "polyshard-resilience"
        polyshard.fully_shard(build())
        polyshard_resilience.enable()  # which changes nothing
        with pytest.raises(LifecycleError, match=r"enable\(\) on every rank before fully_shard"):
            failures.handle_failures(failures.FailureHandler)


@ranks(2)
def test_the_store_of_a_group_that_was_destroyed_ends(rank: int, size: int) -> None:
    """Another group may be initialised on its port, and finds no keys of this one."""
    before, alarms = set(threading.enumerate()), current.Current()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, stores = server.port, [dist.PrefixStore("default_pg", server)]
    del server
    with (
        mock.patch.object(current, "default_store", side_effect=lambda: next(iter(stores), None)),
        mock.patch.object(board, "default_store", side_effect=lambda: next(iter(stores), None)),
    ):
        alarm = alarms.get()
        assert alarms.get() is alarm
        assert alarm.board is not None
        alarm.board.post("test", "here")
        assert alarm.board.read("test", rank) == "here"
        threads = set(threading.enumerate()) - before
        assert {thread.name for thread in threads} == {"polyshard-courier", "polyshard-watch"}
        stores.clear()  # as torch does that destroys the group
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
        assert alarms.get().board is None
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
