"""Whole steps on a device that records them: nothing is used before it is there, or too long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toy_steps import (
    BF16,
    STEPS,
    backward,
    inputs,
    races_of,
    sharded,
    small_transfers,
    step,
)

from polyshard import fully_shard
from polyshard.transport.collective import CollectiveReduce
from polyshard_testing.streams import Recorder, recorded


@pytest.mark.sampled(3)
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


def test_sums_in_flight_are_not_left_to_the_next_step() -> None:
    """Those of a backward that may be followed lack other replicas' until the next is reduced."""
    with recorded(4) as recorder:
        model = sharded((2, 2), layers=1)
        model.set_reduce_scatter_max_input_buffers(2)
        for is_last in (False, True):
            model.set_is_last_backward(is_last)
            model.set_requires_all_reduce(is_last)
            backward(model)
        (group,) = model[0]._polyshard_unit.groups
        assert not group.gradients.waiting
    assert recorder.races == []


class Towers(nn.Module):
    """Each micro-batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor, tower: int) -> torch.Tensor:
        out: torch.Tensor = self.towers[tower](x)
        return out


def test_what_an_earlier_micro_batch_used_is_summed_over_replicas() -> None:
    with recorded(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model: Any = Towers()
        for module in (*model.towers, model):
            fully_shard(module, mesh=mesh)
        for tower, is_last in enumerate((False, True)):
            model.set_is_last_backward(is_last)
            model.set_requires_all_reduce(is_last)
            model(inputs(), tower).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_the_computation_waits_for_replicas_at_the_end_of_backward() -> None:
    """The first layer's backward is behind reduce-scatters of others, and behind no all-reduce."""
    with recorded(4) as recorder:
        model = sharded((2, 2), layers=4)
        known: list[int] = []

        def look(*_: Any) -> None:
            lanes = recorder.ledger.seen("all-reduce")
            assert len(lanes) == 1, "sums over replicas are under way by now"
            (lane,) = lanes
            known.append(recorder.timeline.known("compute").get(lane, 0))

        model[0].register_forward_hook(lambda module, args, out: out.register_hook(look) and None)
        backward(model)
        assert known == [0]
        look()
        assert known[1] > 0, "and behind all of them afterwards"
    assert recorder.races == []


def test_sharded_gradients_give_their_memory_back() -> None:
    """On an accelerator: its allocator keeps what it freed, and gives it to others as well."""
    with recorded(2) as recorder:
        model = sharded()
        backward(model)
        addresses = [p.grad.to_local().data_ptr() for p in model.parameters()]
        held = [a for a in recorder.ledger.allocations() if a.start <= addresses[0] < a.stop]
        assert held
        model.zero_grad()
        for taken in recorder.ledger.allocations():
            assert not any(taken.start <= address < taken.stop for address in addresses)


def test_a_cast_gradient_is_in_flight_once() -> None:
    """In the dtype that travels; what autograd wrote is free as soon as it was cast."""
    written: list[weakref.ref[torch.UntypedStorage]] = []
    prepare = CollectiveReduce.prepare

    def watched(route: CollectiveReduce, sources: Any) -> Any:
        written.extend(weakref.ref(s.untyped_storage()) for s in sources if s is not None)
        return prepare(route, sources)

    with recorded(2), small_transfers(), mock.patch.object(CollectiveReduce, "prepare", watched):
        model = sharded(mp_policy=BF16)
        model.set_is_last_backward(False)  # the last reduction stays in flight
        backward(model)
        gc.collect()
        assert written
        assert [ref() for ref in written] == [None] * len(written)


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_on_a_side_stream_is_waited_for_before_gradients_go(waits: bool) -> None:
    """``record_stream`` does nothing there: the memory is the engine's."""
    with recorded(2) as recorder:
        model, module = sharded((2,)), recorder.module
        side, copies = module.Stream(), []
        for _ in range(3):
            backward(model)
            side.wait_stream(module.current_stream())
            with module.stream(side):
                copies += [p.grad.to_local().clone() for p in model.parameters()]
            if waits:
                module.current_stream().wait_stream(side)
            model.zero_grad()
        assert bool(recorder.races) is not waits


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
