"""Meetings to compare plans, on a store without processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from polyshard import digest
from polyshard.digest import Board, compare_lines
from polyshard.errors import PlanMismatchError


@pytest.mark.parametrize("early", [0, 1])
def test_an_attempt_is_not_compared_with_the_one_before(
    monkeypatch: pytest.MonkeyPatch, early: int
) -> None:
    """A rank that gave up left a digest; the failed one must not take it for the next attempt's."""
    monkeypatch.setattr(digest, "GRACE_SECONDS", 0.0)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    boards = [Board(store, "meeting", rank, (0, 1)) for rank in (0, 1)]
    boards[0].post("failure", "no room")
    with pytest.raises(PlanMismatchError, match="rank 0 failed while planning: no room"):
        compare_lines(boards[1], ["the first plan"])
    assert boards[0].read("digest", 1) is None
    monkeypatch.setattr(digest, "GRACE_SECONDS", 2.0)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(compare_lines, boards[early], ["the second plan"])
        with pytest.raises(TimeoutError):
            first.result(0.2)  # waits, instead of taking what is left for an answer
        compare_lines(boards[1 - early], ["the second plan"])
        first.result(5)
