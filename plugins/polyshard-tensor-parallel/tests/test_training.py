"""Training on data-parallel and tensor-parallel axes at once, against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from toy_models import full
from tp_models import (
    Curve,
    loss_of,
    mean_over,
    meshes,
    mlp,
    mlp_plan,
    shard_blocks,
    tiny,
    tokens_for,
    train,
)

from polyshard import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from polyshard_tensor_parallel import TensorParallel, demo_plan
from polyshard_testing import World, ranks

LAYOUTS = {"fsdp2 x tp2": (2, 2, 0), "hsdp2x1 x tp2": (1, 2, 2), "fsdp1 x tp4": (1, 4, 0)}


def on_all_axes(
    rank: int, size: int, layout: str, steps: int, tied: bool, sequence: bool
) -> tuple[int, Curve, dict[str, torch.Tensor]]:
    dp, tp, replicas = LAYOUTS[layout]
    mesh = meshes(dp, tp, replicas)
    plugin = TensorParallel(demo_plan(sequence_parallel=sequence), mesh=mesh["tp"])
    model = tiny(tied=tied)
    plugin.apply(model)
    data: Any = mesh["replicas", "dp"] if replicas else mesh["dp"]
    shard_blocks(model, mesh=data, plugins=[plugin])
    part = rank // tp
    curve = train(model, [part], steps)
    values = {name: full(value.detach()) for name, value in model.named_parameters()}
    return part, curve, values


def one_process(steps: int, tied: bool, parts: int) -> tuple[Curve, dict[str, torch.Tensor]]:
    model = tiny(tied=tied)
    curve = train(model, range(parts), steps)
    return curve, {name: value.detach() for name, value in model.named_parameters()}


def compare(
    found: list[tuple[int, Curve, dict[str, torch.Tensor]]],
    expected: tuple[Curve, dict[str, torch.Tensor]],
    tolerance: float,
) -> None:
    by_part = {part: curve.losses for part, curve, _ in found}
    losses = mean_over(by_part.values())
    torch.testing.assert_close(losses, expected[0].losses, rtol=tolerance, atol=tolerance)
    for _, curve, values in found:
        torch.testing.assert_close(curve.norms, expected[0].norms, rtol=tolerance, atol=tolerance)
        for name, value in expected[1].items():
            torch.testing.assert_close(
                values[name], value, rtol=10 * tolerance, atol=10 * tolerance
            )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_same_as_one_process(world4: World, layout: str, tied: bool) -> None:
    dp, _, replicas = LAYOUTS[layout]
    found = world4.run(on_all_axes, layout, 3, tied, False)
    compare(found, one_process(3, tied, dp * max(1, replicas)), 1e-4)


def test_sequence_parallel_trains_the_same(world4: World) -> None:
    found = world4.run(on_all_axes, "fsdp2 x tp2", 3, False, True)
    compare(found, one_process(3, False, 2), 1e-4)


@pytest.mark.thorough
@pytest.mark.slow
def test_fifty_steps_stay_on_the_curve(world4: World) -> None:
    found = world4.run(fifty, "plain", timeout=200)
    expected = train(tiny(), range(2), 50, lr=3e-3)
    losses = mean_over({part: curve.losses for part, curve in found}.values())
    torch.testing.assert_close(losses, expected.losses, rtol=1e-3, atol=1e-3)
    assert losses[-1] < losses[0]


def fifty(rank: int, size: int, kind: str) -> tuple[int, Curve]:
    model = sharded()
    return rank // 2, train(model, [rank // 2], 50, lr=3e-3)


def sharded(model: Any = None, **kwargs: Any) -> Any:
    mesh = meshes(2, 2)
    plugin = TensorParallel(demo_plan(), mesh=mesh["tp"])
    model = tiny() if model is None else model
    plugin.apply(model)
    return shard_blocks(model, mesh=mesh["dp"], plugins=[plugin], **kwargs)


def accumulated(rank: int, size: int) -> tuple[int, Curve]:
    return rank // 2, train(sharded(), [rank // 2], 2, micro=3)


def test_gradients_accumulate(world4: World) -> None:
    found = world4.run(accumulated)
    expected = train(tiny(), range(2), 2, micro=3)
    losses = mean_over({part: curve.losses for part, curve in found}.values())
    torch.testing.assert_close(losses, expected.losses, rtol=1e-4, atol=1e-4)
    for _, curve in found:
        torch.testing.assert_close(curve.norms, expected.norms, rtol=1e-4, atol=1e-4)


def checkpointed(rank: int, size: int) -> tuple[int, Curve]:
    model = tiny()
    for block in model.blocks:
        forward = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)
    return rank // 2, train(sharded(model), [rank // 2], 2)


def test_activation_checkpointing_changes_nothing(world4: World) -> None:
    found = world4.run(checkpointed)
    expected = train(tiny(), range(2), 2)
    losses = mean_over({part: curve.losses for part, curve in found}.values())
    torch.testing.assert_close(losses, expected.losses, rtol=1e-4, atol=1e-4)


def compiled(rank: int, size: int) -> tuple[int, Curve, dict[str, torch.Tensor]]:
    import torch._dynamo as dynamo

    model = tiny()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    curve = train(sharded(model), [rank // 2], 2)
    dynamo.reset()
    return rank // 2, curve, {n: full(p.detach()) for n, p in model.named_parameters()}


def test_compiled_blocks_give_their_inputs_gradients(world4: World) -> None:
    """A block compiled by AOT autograd is handed what the embedding's collective still owes."""
    compare(world4.run(compiled, timeout=180), one_process(2, False, 2), 1e-4)


def mixed(rank: int, size: int) -> tuple[int, Curve, bool]:
    model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    curve = train(model, [rank // 2], 4)
    return rank // 2, curve, all(p.dtype == torch.float32 for p in model.parameters())


def test_mixed_precision_stays_near_fp32(world4: World) -> None:
    found = world4.run(mixed)
    expected = train(tiny(), range(2), 4)
    losses = mean_over({part: curve.losses for part, curve, _ in found}.values())
    torch.testing.assert_close(losses, expected.losses, rtol=1e-2, atol=1e-2)
    assert all(kept for _, _, kept in found)
    assert len({tuple(curve.norms) for _, curve, _ in found}) == 1, "one norm on every rank"


def uneven(rank: int, size: int, width: int, hidden: int) -> tuple[int, list[float], list[Any]]:
    """``hidden`` rows over two tensor-parallel and two data-parallel ranks, with a remainder."""
    mesh = meshes(2, 2)
    model = mlp(width=width, hidden=hidden)
    plugin = TensorParallel(mlp_plan(), mesh=mesh["tp"])
    plugin.apply(model)
    sharded_model: Any = fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    curve = train(sharded_model, [rank // 2], 3, loss=regression(width))
    return rank // 2, curve.losses, [full(p.detach()) for p in model.parameters()]


def regression(width: int) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens.float().flatten()[: 3 * width].view(3, width) / 128 - 1
        out: torch.Tensor = model(x).square().mean()
        return out

    return loss


@pytest.mark.parametrize(("width", "hidden"), [(10, 12), (5, 6), (7, 2), (3, 14)])
def test_uneven_shards_train_the_same(world4: World, width: int, hidden: int) -> None:
    """``hidden`` / 2 rows are odd, or one row for two ranks: an empty shard."""
    found = world4.run(uneven, width, hidden)
    reference = mlp(width=width, hidden=hidden)
    expected = train(reference, range(2), 3, loss=regression(width))
    losses = mean_over({part: losses for part, losses, _ in found}.values())
    torch.testing.assert_close(losses, expected.losses, rtol=1e-4, atol=1e-4)
    for _, _, values in found:
        for value, parameter in zip(values, reference.parameters(), strict=True):
            torch.testing.assert_close(value, parameter.detach(), rtol=1e-3, atol=1e-4)


@ranks(4)
def test_frozen_and_unused_parameters(rank: int, size: int) -> None:
    """Frozen parameters stay as they are; unused ones get no gradient."""
    model = tiny()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    model.unused = nn.Linear(4, 4)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sharded(model)
    loss_of(model, tokens_for(0, rank // 2)).backward()
    for name, parameter in model.named_parameters():
        has_none = name.startswith(("blocks.0.", "unused."))
        assert (parameter.grad is None) is has_none, name
        assert torch.equal(full(parameter.detach()), before[name])


@ranks(4)
def test_parameters_on_a_mesh_of_both_roles(rank: int, size: int) -> None:
    """DTensor parameters on one mesh of both roles, which fully_shard is told apart by name."""
    mesh = meshes(2, 2)
    model, whole = mlp(width=8, hidden=12), mlp(width=8, hidden=12)
    places: dict[str, Placement] = {"up.weight": Shard(0), "up.bias": Shard(0)}
    places["down.weight"] = Shard(1)
    for name, parameter in list(model.named_parameters()):
        module, _, own = name.rpartition(".")
        put = [Replicate(), places.get(name, Replicate())]
        value = distribute_tensor(parameter.detach(), mesh, put)
        setattr(model.get_submodule(module), own, nn.Parameter(value))
    dims = DataParallelMeshDims(shard="dp")
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims, plugins=[TensorParallel()])
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    placed = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    out: Any = model(placed)
    local = out.redistribute(placements=[Shard(0), Replicate()]).to_local()
    local.square().mean().backward()
    (whole(x).square().mean()).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.device_mesh == mesh  # type: ignore[attr-defined]
        torch.testing.assert_close(full(ours.detach()), theirs.detach())
        torch.testing.assert_close(full(ours.grad), theirs.grad)


@ranks(4)
def test_meta_init(rank: int, size: int) -> None:
    """A model from the meta device: parts of the plan differ, the rest is the same everywhere."""
    with torch.device("meta"):
        model = mlp(width=8, hidden=12)
    mesh = meshes(2, 2)
    plugin = TensorParallel(mlp_plan(), mesh=mesh["tp"])
    plugin.apply(model)
    fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    model.to_empty(device=torch.get_default_device())
    torch.manual_seed(rank)  # ranks need not agree
    for module in (model.norm, model.up, model.down):
        module.reset_parameters()
    plugin.synchronize(model)
    values: list[Any] = [None] * size
    dist.all_gather_object(values, [full(p.detach()).cpu() for p in model.parameters()])
    for other in values:
        assert all(torch.equal(a, b) for a, b in zip(values[0], other, strict=True))
    rows = values[0][2]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows), "every part was drawn anew"


@ranks(4)
def test_parameters_share_a_mesh(rank: int, size: int) -> None:
    """Plan or not, parameters share a mesh: foreach optimizers take them, as does torch's norm."""
    model, single = sharded(), tiny()
    assert len({p.device_mesh for p in model.parameters()}) == 1
    both = []
    for each in (model, single):
        for part in [rank // 2] if each is model else [0, 1]:
            (loss_of(each, tokens_for(0, part)) / (1 if each is model else 2)).backward()
        both.append(full(nn.utils.clip_grad_norm_(each.parameters(), 0.5)).item())
        torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True).step()
    assert both[0] == pytest.approx(both[1], rel=1e-4)
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(full(ours.detach()), theirs.detach(), rtol=1e-3, atol=1e-3)
