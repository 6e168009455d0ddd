"""Whatever is changed between micro-batches, accumulated gradients survive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from toy_comms import CountingGather, CountingReduce
from toy_models import build, full, loss_of, shard, tokens_for

import polyshard
from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard_testing import World, ranks

SMALL = {"width": 24, "hidden": 30, "layers": 2}
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def assigned(model: nn.Module) -> None:
    state: dict[str, Any] = {n: v.clone() for n, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def change(model: Any, what: str) -> None:
    """None of these changes a value."""
    if what == "assign":
        assigned(model)
    elif what == "piece":
        state = {n: v.clone() for n, v in model.state_dict().items() if n == "blocks.0.up.weight"}
        model.load_state_dict(state, strict=False, assign=True)
    elif what == "describe":
        assert str(polyshard.describe(model))
    elif what == "comms":
        model.blocks[0].set_custom_all_gather(CountingGather())
        model.blocks[0].set_custom_reduce_scatter(CountingReduce())
    elif what == "reshard":
        model.set_reshard_after_forward(True)
    else:
        assert what in ("nothing", "to")
        model.to(torch.float32)


def gradients(model: nn.Module) -> list[Tensor]:
    assert all(p.grad is not None for p in model.parameters())
    return [full(p.grad) for p in model.parameters() if p.grad is not None]


def accumulated(model: Any, rank: int, what: str, inside: bool) -> list[Tensor]:
    """Three micro-batches; something changes after the first, or before its backward."""
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss = loss_of(model, tokens_for(micro, rank))
        if micro == 0 and inside:
            change(model, what)
        loss.backward()
        if micro == 0 and not inside:
            change(model, what)
    return gradients(model)


CHANGES = ("assign", "piece", "describe", "comms", "reshard", "to")


def survive(rank: int, size: int, what: str, kwargs: dict[str, Any]) -> None:
    for inside in (False, True):
        model, twin = (shard(build(**SMALL), fully_shard, **kwargs) for _ in range(2))
        expected = accumulated(twin, rank, "nothing", inside=False)
        found = accumulated(model, rank, what, inside)
        for name, ours, theirs in zip(dict(model.named_parameters()), found, expected, strict=True):
            assert torch.equal(ours, theirs), (name, inside)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", CHANGES)
def test_gradients_survive(world1: World, world2: World, what: str) -> None:
    world2.run(survive, what, {})
    if what != "comms":
        world1.run(survive, what, {})


@pytest.mark.parametrize("what", ["assign", "comms", "reshard"])
def test_gradients_in_another_dtype_survive(world2: World, what: str) -> None:
    world2.run(survive, what, {"mp_policy": BF16})


@pytest.mark.parametrize("what", ["assign", "reshard"])
def test_gradients_survive_with_blocks(world4: World, what: str) -> None:
    world4.run(survive, what, {"reshard_after_forward": 2})


@ranks(2)
def test_torch_keeps_them_too(rank: int, size: int) -> None:
    ours, theirs = shard(build(**SMALL), fully_shard), shard(build(**SMALL), torch_fully_shard)
    pairs = zip(
        accumulated(ours, rank, "assign", inside=False),
        accumulated(theirs, rank, "assign", inside=False),
        strict=True,
    )
    for mine, reference in pairs:
        assert torch.equal(mine, reference)


@ranks(2)
def test_gradients_are_converted_too(rank: int, size: int) -> None:
    """A plain module's gradients are converted with it."""
    model, reference = shard(build(**SMALL), fully_shard), build(**SMALL)
    some: Any = model
    some.set_requires_gradient_sync(False)
    loss_of(model, tokens_for(0, 0)).backward()
    loss_of(reference, tokens_for(0, 0)).backward()
    some.set_requires_gradient_sync(True)
    for each in (model, reference):
        each.double()
        loss_of(each, tokens_for(1, 0)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype == torch.float64
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["assign", "comms"])
@ranks(4)
def test_partial_sums_survive(rank: int, size: int, what: str) -> None:
    """What replicas have not yet added up."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, size // 2), mesh_dim_names=("replicate", "shard")
    )
    found = []
    for changing in ("nothing", what):
        model: Any = shard(build(**SMALL), fully_shard, mesh=mesh)
        model.set_requires_all_reduce(False)
        loss_of(model, tokens_for(0, rank)).backward()
        change(model, changing)
        model.set_requires_all_reduce(True)
        loss_of(model, tokens_for(1, rank)).backward()
        found.append(gradients(model))
    for expected, ours in zip(*found, strict=True):
        assert torch.equal(expected, ours)
    dist.barrier()
