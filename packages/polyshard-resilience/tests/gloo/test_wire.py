"""What ranks say of the transfers that they have begun can be compared, however many there were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyshard.failures import failure_handler
from polyshard.transport.gloo.owners import GlooOwner
from polyshard_resilience import enable
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.wire import REMEMBERED, WatchedWire
from polyshard_testing import ranks

TAGS = 7


def wire() -> WatchedWire:
    group = dist.group.WORLD
    assert group is not None
    return WatchedWire(group, Alarm(None), (0,))


@pytest.mark.parametrize("more", [0, 3, TAGS])
@ranks(1)
def test_the_next_transfer_is_one_that_the_other_rank_has_not_begun(
    rank: int, size: int, more: int
) -> None:
    """Of every tag, though ranks remember different transfers: one has begun others besides."""
    for tag in range(TAGS):
        ours, theirs = (wire() for _ in range(2))
        for each in range(REMEMBERED + 10):
            ours.begin(each % TAGS)
            theirs.begin(each % TAGS)
        for other in range(more):
            theirs.begin(TAGS + other)
        number = ours.begin(tag)
        assert ours.count(number) == theirs.posted()[theirs.key(tag)] + 1
        number = theirs.begin(tag)
        assert theirs.count(number) == ours.posted()[ours.key(tag)]


@ranks(3)
def test_owners_count_the_transfers_that_others_count(rank: int, size: int) -> None:
    """An owner takes the parts of a sum one after the other: they are one transfer."""
    enable()
    group = dist.group.WORLD
    assert group is not None
    wire: Any = failure_handler().wire(group, tuple(range(size)))
    route = GlooOwner(wire, rank, size, tag=7)
    part = torch.full((4,), rank + 1.0, device="cpu")
    for _ in range(2):
        for owner in range(size):
            is_owner = rank == owner
            total = torch.empty(4, device="cpu")
            rows = [torch.empty(4, device="cpu") for _ in range(size)] if is_owner else None
            route.reduce(owner, owner, part, total if is_owner else None).wait()
            route.broadcast(owner, owner, total).wait()
            assert total.tolist() == [6.0] * 4
            route.gather(owner, owner, part, rows, 4).wait()
            route.scatter(owner, owner, rows, total, 4).wait()
            assert total.equal(part)
    counts: list[Any] = [None] * size
    dist.all_gather_object(counts, {k: n for k, n in wire.posted().items() if n})
    assert counts == [counts[0]] * size
    assert set(counts[0].values()) == {2}


@ranks(1)
def test_tags_of_models_that_are_gone_are_forgotten(rank: int, size: int) -> None:
    one = wire()
    for tag in range(3 * REMEMBERED):
        one.begin(tag)
    assert len(one.posted()) <= REMEMBERED
    assert len(one._counts) <= REMEMBERED
