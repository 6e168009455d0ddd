"""Memory of a shard on the device: freed when it is not in use, and not before."""

from __future__ import annotations

import torch

from polyshard_offload.shards.staging import Staging, StagingState


def two() -> tuple[Staging, Staging, StagingState]:
    state = StagingState()
    first, second = (Staging(8, torch.float32, torch.device("cpu"), state) for _ in range(2))
    return first, second, state


def test_only_one_is_held_for_its_views() -> None:
    first, second, state = two()
    view = first.viewable().view(2, 4)
    assert state.bytes_now == 32
    second.viewable()
    assert state.bytes_now == 32
    assert view.untyped_storage().nbytes() == 0


def test_memory_in_use_stays_whoever_asks_for_views() -> None:
    """A thread may be filling it, or a transfer reading it, when transfers are bound anew."""
    first, second, state = two()
    first.viewable()
    first.in_use()
    first.tensor.fill_(3.0)
    first.viewable()  # bound again meanwhile
    second.viewable()
    assert bool((first.tensor == 3.0).all())
    assert state.bytes_now == 64
    first.release()
    assert state.bytes_now == 32
    first.viewable()
    assert state.bytes_now == 32, "the other one was idle"
