"""Whole steps on a device that records them: nothing is used before it is there, or too long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from toy_steps import BF16, STEPS, backward, races_of, sharded, small_transfers, step

from polyshard.testing.streams import Recorder, recorded


@pytest.mark.parametrize("run", STEPS, ids=lambda run: run.__name__)
def test_a_step_is_ordered(run: Callable[[Recorder], None]) -> None:
    assert races_of(run) == []


def test_units_share_lanes_that_own_no_memory() -> None:
    """Two lanes with FSDP2's priority, and a third without it; casts belong to the computation."""
    with recorded(4) as recorder, small_transfers():
        step(sharded((2, 2), mp_policy=BF16))
        homes = {allocation.home for allocation in recorder.ledger.allocations()}
        assert [stream.priority for stream in recorder.module.streams] == [-1, -1, 0]
    assert homes == {"compute"}


def test_replicas_are_summed_beside_the_computation() -> None:
    """Partial sums of before included: no all-reduce is on the stream that computes."""
    with recorded(4) as recorder:
        model = sharded((2, 2))
        for sums in (False, True):
            model.set_requires_all_reduce(sums)
            backward(model)
        used = recorder.ledger.seen("all-reduce")
        gradient = model[0].weight.grad.to_local()
        assert not torch.equal(gradient, torch.zeros_like(gradient))
    assert len(used) == 1
    assert used != {"compute"}


def test_what_nothing_orders_is_a_race() -> None:
    """A stream that writes what another reads, with and without an event; memory given back."""
    with recorded(1) as recorder:
        module, values = recorder.module, torch.zeros(4)
        side, event = module.Stream(), module.Event()
        with module.stream(side):
            values.add_(1)
        assert len(recorder.races) == 1
        event.record(side)
        module.current_stream().wait_event(event)
        values.add_(1)
        assert len(recorder.races) == 1
        side.wait_stream(module.current_stream())
        with module.stream(side):
            values.sum()
        del values
        assert len(recorder.races) == 2
    assert "its next owner writes on compute" in str(recorder.races[1])
