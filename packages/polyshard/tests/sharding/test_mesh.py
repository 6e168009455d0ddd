"""Meshes of every kind, against one process that trains on the whole batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from toy_collectives import ByCollectives
from toy_models import build, full, loss_of, shard, tokens_for, train

from polyshard import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ShardPlacement,
    describe,
    fully_shard,
    stats,
)
from polyshard.engine.root import units_below
from polyshard_testing import ranks

STEPS = 3
Kwargs = Callable[[int], dict[str, Any]]


def equals_one_process(rank: int, size: int, make: Kwargs, parts: int) -> None:
    """Train on ``parts`` different shares of the batch, and alone on all of it."""
    model = shard(build(), fully_shard, **make(size))
    reference = build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for step in range(STEPS):
        loss_of(model, tokens_for(step, rank % parts)).backward()
        for part in range(parts):
            (loss_of(reference, tokens_for(step, part)) / parts).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), (_, b) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        torch.testing.assert_close(full(a.detach()), b.detach(), rtol=2e-4, atol=2e-5, msg=name)


def named(*shape: int, dims: DataParallelMeshDims, names: tuple[str, ...]) -> Kwargs:
    return lambda size: {
        "mesh": init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names),
        "dp_mesh_dims": dims,
    }


def replicated(size: int) -> dict[str, Any]:
    return {"shard_placement_fn": lambda p: Replicate() if p.ndim == 1 else None}


MESHES: dict[str, tuple[Kwargs, int]] = {
    "one axis of two": (
        named(2, 2, dims=DataParallelMeshDims(shard="dp"), names=("dp", "tp")),
        2,
    ),
    "two axes shard": (
        named(2, 2, dims=DataParallelMeshDims(shard=("dp", "cp")), names=("dp", "cp")),
        4,
    ),
    "both roles": (
        named(2, 2, dims=DataParallelMeshDims(shard="s", replicate="r"), names=("s", "r")),
        4,
    ),
    "replicate only": (named(4, dims=DataParallelMeshDims(replicate="dp"), names=("dp",)), 4),
    "replicated biases": (replicated, 4),
    "replicated biases, two axes": (
        lambda size: {
            **replicated(size),
            "mesh": init_device_mesh(
                torch.get_default_device().type, (2, 2), mesh_dim_names=("r", "s")
            ),
        },
        4,
    ),
    "blocks": (lambda size: {"reshard_after_forward": 2}, 4),
    "blocks of nonzero dims": (
        lambda size: {
            "reshard_after_forward": 2,
            "shard_placement_fn": lambda p: Shard(p.ndim - 1),
        },
        4,
    ),
}


@ranks(4)
def test_one_axis_of_a_larger_mesh(rank: int, size: int) -> None:
    make, _ = MESHES["one axis of two"]
    equals_one_process(rank // 2, size, make, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [k for k in MESHES if k != "one axis of two"])
@ranks(4)
def test_meshes_equal_one_process(rank: int, size: int, kind: str) -> None:
    equals_one_process(rank, size, *MESHES[kind])


@ranks(4)
def test_named_axes_get_their_roles(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("s", "r"))
    dims = DataParallelMeshDims(shard="s", replicate="r")
    model = shard(build(), fully_shard, mesh=mesh, dp_mesh_dims=dims)
    weight: Any = model.head.weight
    assert weight.placements == (Replicate(), Shard(0))
    assert weight.device_mesh.mesh_dim_names == ("r", "s")
    assert "r=2 (replicate) x s=2 (shard)" in str(describe(model))
    alone = shard(build(), fully_shard, **MESHES["replicate only"][0](size))
    for parameter in alone.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Replicate(),)


@ranks(2)
def test_foreach_optimizers_take_replicated_parameters(rank: int, size: int) -> None:
    """All parameters are DTensors, so that foreach optimizers take them together."""
    model = shard(build(), fully_shard, **replicated(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    loss_of(model, tokens_for(0, rank)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    reference = build()
    for part in range(size):
        (loss_of(reference, tokens_for(0, part)) / size).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    torch.testing.assert_close(full(norm), expected, rtol=1e-5, atol=1e-6)


class Experts(nn.Module):
    """A shared layer, and experts of which each half of the world trains its own."""

    def __init__(self, half: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared = nn.Linear(6, 6)
        torch.manual_seed(10 + half)
        self.experts = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(torch.tanh(self.shared(x)))
        return out


def expert_batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(50 * step + rank))


NEWER = pytest.mark.skipif(
    not hasattr(torch_fsdp, "DataParallelMeshDims"), reason="torch 2.11 has no ShardPlacementResult"
)


@pytest.mark.parametrize(
    "torch_answer", [False, pytest.param(True, marks=NEWER)], ids=["ours", "torch's"]
)
@ranks(4)
def test_experts_may_have_a_mesh_of_their_own(rank: int, size: int, torch_answer: bool) -> None:
    """Experts on a mesh of two, everything else on all four ranks, in one unit."""
    world = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("ep", "efsdp")
    )
    everyone = init_device_mesh(torch.get_default_device().type, (4,), mesh_dim_names=("dp",))
    half = rank // 2
    model = Experts(half)
    mine = set(model.experts.parameters())
    answer: Any = ShardPlacement(Shard(0), world["efsdp"])
    if torch_answer:
        common: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
        answer = common.ShardPlacementResult(Shard(0), common.FSDPMeshInfo(world["efsdp"], 0))
    fully_shard(model, mesh=everyone, shard_placement_fn=lambda p: answer if p in mine else None)
    on = everyone.device_type
    assert [g.mesh for g in describe(model).groups] == [
        f"{on} dp=4 (shard)",
        f"{on} efsdp=2 (shard)",
    ]
    halves = [Experts(0), Experts(1)]
    reference = [halves[0].shared, halves[0].experts, halves[1].experts]
    halves[1].shared = halves[0].shared
    ours = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    theirs = torch.optim.SGD([p for m in reference for p in m.parameters()], lr=0.1)
    for step in range(STEPS):
        model(expert_batch(step, rank)).square().mean().backward()
        for other in range(size):
            loss = halves[other // 2](expert_batch(step, other)).square().mean() / size
            loss.backward()
        for expert in reference[1:]:  # averaged over two ranks, not four
            for parameter in expert.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.named_parameters():
        expected = halves[half].get_parameter(name)
        torch.testing.assert_close(full(value.detach()), expected.detach(), msg=name)


@ranks(4)
def test_experts_keep_their_own_values_when_loaded(rank: int, size: int) -> None:
    """transformers#45662: after loading, every half has its own experts again."""
    world = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("ep", "efsdp")
    )
    model = Experts(rank // 2)
    mine = set(model.experts.parameters())
    chosen = ShardPlacement(Shard(0), world["efsdp"])
    fully_shard(model, shard_placement_fn=lambda p: chosen if p in mine else None)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    expected = Experts(rank // 2)
    for name, value in model.named_parameters():
        assert torch.equal(full(value.detach()), expected.get_parameter(name).detach())


@pytest.mark.parametrize("kwargs", [{}, {"reshard_after_forward": 2}], ids=["plain", "blocks"])
@ranks(4)
def test_process_groups_do_not_grow(rank: int, size: int, kwargs: dict[str, Any]) -> None:
    """The number of process groups does not follow the number of layers."""
    counts = []
    for layers in (1, 4):
        before = len(dist.distributed_c10d._world.pg_map)
        model = shard(build(layers=layers), fully_shard, **kwargs)
        loss_of(model, tokens_for(0, rank)).backward()
        counts.append(len(dist.distributed_c10d._world.pg_map) - before)
    assert counts[1] <= counts[0]


@ranks(4)
def test_process_groups_are_made_while_sharding(rank: int, size: int) -> None:
    """Not in a forward, which need not be that of all ranks of the world."""
    kwargs: dict[str, Any] = {"reshard_after_forward": 2, "plugins": [ByCollectives()]}
    model: Any = shard(build(layers=2), fully_shard, **kwargs)
    model.set_separate_reduce_scatter_group()
    made = set(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        loss_of(model, tokens_for(0, rank)).backward()
    assert set(dist.distributed_c10d._world.pg_map) == made


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@ranks(4)
def test_blocks_change_no_bit(rank: int, size: int, dtype: torch.dtype | None) -> None:
    """Bitwise what freeing everything gives; backward gathers half of what forward does."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    plain = shard(build(), fully_shard, mp_policy=policy)
    model = shard(build(), fully_shard, mp_policy=policy, reshard_after_forward=2)
    batches = [tokens_for(step, rank) for step in range(STEPS)]
    assert train(model, batches).losses == train(plain, batches).losses
    block = describe(model).groups[1]
    assert block.name == "blocks.0"
    assert block.reshard_after_forward == 2
    assert "to 2 ranks" in str(describe(model))
    itemsize = block.dtypes.param.itemsize
    half = block.layout.unsharded_numel // 2 * itemsize
    assert half <= block.regather_bytes <= half + itemsize
    traffic = stats(model).groups["blocks.0"]
    reduced = STEPS * block.reduce_bytes
    assert traffic.sent_bytes - reduced == STEPS * (block.gather_bytes + block.regather_bytes)


@ranks(4)
def test_blocks_follow_changed_parameters(rank: int, size: int) -> None:
    """What a block holds is not used after the shards have changed, and is freed in the end."""
    model: Any = shard(build(), fully_shard, reshard_after_forward=2)
    plain: Any = shard(build(), fully_shard)
    for each in (model, plain):
        each(tokens_for(0, rank))  # no backward follows
        each.reshard()  # so that what is written below are shards, not the root's gathered copies
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(0.5)
    losses = [loss_of(each, tokens_for(1, rank)) for each in (model, plain)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    groups = [g for _, _, unit in units_below(model) for g in unit.groups]
    held = [g.prepare().block for g in groups]
    assert all(block is not None and not block.holds for block in held)
    model.set_reshard_after_forward(True)
    loss_of(model, tokens_for(2, rank)).backward()
    assert all(g.prepare().block is None for g in groups)


@ranks(2)
def test_axes_must_exist_and_have_one_role(rank: int, size: int) -> None:
    mesh: DeviceMesh = init_device_mesh(
        torch.get_default_device().type, (size,), mesh_dim_names=("dp",)
    )
    for dims, words in (
        (DataParallelMeshDims(shard="tp"), r"names \['tp'\], which are not axes"),
        (DataParallelMeshDims(shard="dp", replicate="dp"), r"gives \['dp'\] both roles"),
    ):
        with pytest.raises(ValueError, match=words):
            fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=dims)
