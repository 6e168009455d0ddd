"""Training with polyshard against torch's fully_shard and against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from toy_models import assert_same_parameters, build, loss_of, shard, tokens_for, train

from polyshard import MixedPrecisionPolicy, describe, fully_shard, stats
from polyshard_testing import World, ranks

STEPS = 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_ALL = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
REDUCE_BF16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)


def against_torch(rank: int, size: int, kwargs: dict[str, Any], exact: bool) -> None:
    batches = [tokens_for(step, rank) for step in range(STEPS)]
    reference, ours = build(), build()
    shard(reference, torch_fully_shard, **kwargs)
    shard(ours, fully_shard, **kwargs)
    expected = train(reference, batches, clip=0.5)
    found = train(ours, batches, clip=0.5)
    if exact:
        assert found == expected
    else:
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-3, atol=1e-3)
    tolerant = exact or kwargs.get("mp_policy") is None
    if tolerant:
        assert_same_parameters(ours, reference, exact=exact)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
        {"mp_policy": BF16},
        {"mp_policy": BF16_ALL},
        {"mp_policy": REDUCE_BF16},
        {"mp_policy": FP16},
    ],
    ids=["fp32", "keep", "free", "bf16", "bf16 all", "reduce bf16", "fp16"],
)
def test_two_ranks_are_bitwise_fsdp2(world2: World, kwargs: dict[str, Any]) -> None:
    world2.run(against_torch, kwargs, True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kwargs", [{}, {"mp_policy": BF16}], ids=["fp32", "bf16"])
def test_three_and_four_ranks_follow_fsdp2(
    world3: World, world4: World, kwargs: dict[str, Any]
) -> None:
    world3.run(against_torch, kwargs, False)
    world4.run(against_torch, kwargs, False)


def against_one_process(rank: int, size: int, shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)
    ours = shard(build(), fully_shard, mesh=mesh)
    reference = build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, reference)]
    for step in range(STEPS):
        loss_of(ours, tokens_for(step, rank)).backward()
        everything = torch.cat([tokens_for(step, r) for r in range(size)])
        loss_of(reference, everything).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(ours, reference, exact=False)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4)], ids=str)
def test_four_ranks_equal_one_process(world4: World, shape: tuple[int, ...]) -> None:
    world4.run(against_one_process, shape)


def test_one_rank_equals_one_process(world1: World) -> None:
    world1.run(against_one_process, (1,))


def test_three_ranks_equal_one_process(world3: World) -> None:
    world3.run(against_one_process, (3,))


@pytest.mark.parametrize("kwargs", [{}, {"mp_policy": BF16}], ids=["fp32", "bf16"])
@ranks(2)
def test_accumulation_is_bitwise_fsdp2(rank: int, size: int, kwargs: dict[str, Any]) -> None:
    """Two unsynced micro-batches and a synced one, against FSDP2 doing the same."""
    models = [shard(build(), f, **kwargs) for f in (torch_fully_shard, fully_shard)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models]
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)  # type: ignore[operator]
                loss_of(model, tokens_for(10 * step + micro, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(models[1], models[0], exact=True)


@ranks(2)
def test_synced_micro_batches_add_up(rank: int, size: int) -> None:
    ours, reference = shard(build(), fully_shard), build()
    for micro in range(3):
        loss_of(ours, tokens_for(micro, rank)).backward()
        for r in range(size):
            (loss_of(reference, tokens_for(micro, r)) / size).backward()
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kwargs", [{}, {"mp_policy": BF16}], ids=["fp32", "bf16"])
@ranks(2)
def test_predicted_bytes_are_those_moved(rank: int, size: int, kwargs: dict[str, Any]) -> None:
    model = shard(build(), fully_shard, **kwargs)
    predicted = describe(model).step_bytes
    loss_of(model, tokens_for(0, rank)).backward()
    assert stats(model).bytes_sent == predicted
    assert describe(model).step_bytes == predicted


@ranks(2)
def test_bytes_of_a_matrix_by_hand(rank: int, size: int) -> None:
    """A bias-free square matrix: half of it leaves each of two ranks, in each direction."""
    module = torch.nn.Linear(512, 512, bias=False)
    fully_shard(module)
    half = 512 * 512 * 4 // 2
    plan = describe(module).groups[0]
    assert (plan.gather_bytes, plan.reduce_bytes) == (half, half)
    module(torch.ones(1, 512)).sum().backward()
    assert stats(module).bytes_sent == 2 * half


@ranks(2)
def test_eligible_parameters_are_not_copied(rank: int, size: int) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(4, 512)
    model(x).sum().backward()
    with torch.profiler.profile(record_shapes=True) as profile:
        model(x).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert any(name.startswith("polyshard.unshard") for name in names)
    copies = {"fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat"}
    assert not names & (copies | {"aten::cat", "aten::split_with_sizes_copy"})
    spans = [e for e in profile.events() if e.name.startswith("polyshard.")]
    copied = [
        (span.name, event.input_shapes[0])
        for span in spans
        for event in profile.events()
        if event.name == "aten::copy_"
        and event.input_shapes[0]  # not the 0-dim scalar of a division
        and span.time_range.start <= event.time_range.start < span.time_range.end
    ]
    # All that is copied over gloo is the rank's own chunk, into the region: one per gather.
    gathers = [s for s in spans if s.name.startswith("polyshard.unshard")]
    assert len(gathers) == 6
    assert len(copied) == (6 if model[0].weight.device.type == "cpu" else 0)
    for name, shape in copied:
        assert name.startswith("polyshard.unshard")
        assert shape == [512 * 512 // size]


@ranks(3)
def test_runs_repeat_bit_by_bit(rank: int, size: int) -> None:
    losses = [
        train(
            shard(build(width=24, hidden=30, layers=3), fully_shard),
            [tokens_for(s, rank) for s in range(3)],
        ).losses
        for _ in range(2)
    ]
    assert losses[0] == losses[1]
