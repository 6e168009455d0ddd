"""What ranks say of the transfers that they have begun can be compared, however many there were."""

from __future__ import annotations

import pytest
import torch.distributed as dist

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


@ranks(1)
def test_tags_of_models_that_are_gone_are_forgotten(rank: int, size: int) -> None:
    one = wire()
    for tag in range(3 * REMEMBERED):
        one.begin(tag)
    assert len(one.posted()) <= REMEMBERED
    assert len(one._counts) <= REMEMBERED
