"""Gradient norms and clipping over all kinds of meshes, against one process."""

from __future__ import annotations

import copy
import inspect
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from toy_models import build, full, loss_of, shard, tokens_for

from polyshard import ShardPlacement, clip_grad_norm_, fully_shard, grad_norm
from polyshard.errors import NonFiniteError, SettingError
from polyshard_testing import ranks

MESHES = {"fsdp": (4,), "hsdp": (2, 2), "replicas": (4, 1), "shards": (1, 4)}


def test_takes_what_torch_takes() -> None:
    theirs = inspect.signature(nn.utils.clip_grad_norm_).parameters
    ours = inspect.signature(clip_grad_norm_).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[n].default for n in theirs] == [p.default for p in theirs.values()]


SMALL = {"width": 24, "hidden": 30, "layers": 1}


def reference_of(size: int) -> nn.Module:
    model = build(**SMALL)
    for rank in range(size):
        (loss_of(model, tokens_for(0, rank)) / size).backward()
    return model


@pytest.mark.parametrize("shape", MESHES.values(), ids=list(MESHES))
@ranks(4)
def test_norms_are_those_of_one_process(rank: int, size: int, shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)
    kwargs: Any = {"mesh": mesh, "shard_placement_fn": lambda p: Shard(p.ndim - 1)}
    model, reference = shard(build(**SMALL), fully_shard, **kwargs), reference_of(size)
    loss_of(model, tokens_for(0, rank)).backward()
    gradients = [[p.grad for p in m.parameters()] for m in (model, reference)]
    for norm_type in (2.0, 1.0, 3.0, math.inf, 0.0, -math.inf, -1.0, -2.5):
        for each, saved in zip((model, reference), gradients, strict=True):
            for parameter, gradient in zip(each.parameters(), saved, strict=True):
                assert gradient is not None
                parameter.grad = gradient.clone()
        norm = clip_grad_norm_(model.parameters(), 0.05, norm_type)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)
        assert not isinstance(norm, DTensor)
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-3, atol=1e-6)


@ranks(2)
def test_ranks_without_elements_of_a_dtype_add_in_it_too(rank: int, size: int) -> None:
    """Only the first rank holds a row of the ``float64`` parameter."""
    module: Any = nn.Module()
    torch.manual_seed(0)
    module.short = nn.Parameter(torch.randn(1, 3, dtype=torch.float64))
    module.long = nn.Parameter(torch.randn(4, 3))
    module.forward = lambda: module.short.square().sum() + module.long.square().sum()
    expected = torch.cat([2 * p.detach().double().flatten() for p in module.parameters()])
    fully_shard(module)
    module().backward()
    for norm_type in (2.0, math.inf):
        norm = grad_norm(module.parameters(), norm_type)
        assert norm.dtype == torch.float64
        torch.testing.assert_close(norm, torch.linalg.vector_norm(expected, norm_type))


def known_norm(parameter: torch.Tensor, module: Any) -> torch.Tensor | None:
    """Of most gradients."""
    if parameter is module.plain or parameter is module.short:
        return None
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    norm: torch.Tensor = gradient.to_local().float().norm()
    return norm


@ranks(4)
def test_meshes_placements_and_dtypes_may_differ(rank: int, size: int) -> None:
    """Two meshes, a replicated parameter, a plain one, two dtypes; torch refuses this."""
    pairs = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("a", "b"))
    module: Any = nn.Module()
    torch.manual_seed(0)
    module.wide = nn.Parameter(torch.randn(7, 3))
    module.narrow = nn.Parameter(torch.randn(5, 2))
    module.whole = nn.Parameter(torch.randn(4))
    module.short = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
    module.plain = nn.Parameter(torch.randn(3))
    expected = torch.cat([p.detach().float().flatten() for p in module.parameters()]).norm()
    chosen = {
        id(module.narrow): ShardPlacement(Shard(1), pairs["b"]),
        id(module.whole): Replicate(),
    }
    module.forward = lambda: None
    fully_shard(
        module,
        shard_placement_fn=lambda p: chosen.get(id(p)),
        ignored_params={module.plain},
    )
    for parameter in module.parameters():
        parameter.grad = parameter.detach().clone()
    with pytest.raises(RuntimeError):
        nn.utils.clip_grad_norm_(module.parameters(), 1e9)
    looked = grad_norm(module.parameters())
    told = grad_norm(module.parameters(), known=lambda p: known_norm(p, module))
    norm = clip_grad_norm_(module.parameters(), 1e9)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(looked, norm)
    torch.testing.assert_close(told, norm, rtol=1e-6, atol=0)
    assert grad_norm(module.parameters(), 0).item() == 5


@pytest.mark.parametrize("order", [2.0, math.inf, 0.0, -math.inf, -2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@ranks(3)
def test_shards_may_be_empty(rank: int, size: int, dtype: torch.dtype, order: float) -> None:
    """One row for each rank but the last: what it sends is what the others send."""
    module: Any = nn.Module()
    torch.manual_seed(0)
    module.rows = nn.Parameter(torch.randn(size - 1, 3, dtype=dtype))
    module.more = nn.Parameter(torch.randn(1, dtype=dtype))
    module.forward = lambda: None
    whole = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
    fully_shard(module)
    for parameter in (*module.parameters(), *whole):
        parameter.grad = parameter.detach().clone()
    norm = clip_grad_norm_(module.parameters(), 0.5, order)
    expected = nn.utils.clip_grad_norm_(whole, 0.5, order)
    assert norm.dtype == expected.dtype == dtype
    torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(module.parameters(), whole, strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)


@ranks(4)
def test_experts_of_all_ranks_count(rank: int, size: int) -> None:
    """Experts that differ between halves of the world count all."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("ep", "efsdp"))
    shared, expert = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    fully_shard(shared)
    fully_shard(expert, mesh=mesh["efsdp"])
    half = rank // 2
    for module, value in ((shared, 1.0), (expert, 2.0 + half)):
        weight: Any = module.weight
        weight.grad = torch.full_like(weight, value)
    everything = [*shared.parameters(), *expert.parameters()]
    over = {mesh.get_group("ep"): list(expert.parameters())}
    norm = clip_grad_norm_(everything, 1.0, distinct_over=over)
    assert norm.item() == pytest.approx(math.sqrt(9 * (1 + 4 + 9)))
    assert grad_norm(everything, 0, distinct_over=over).item() == 3
    weight = expert.weight
    expected = (2.0 + half) / norm.item()
    assert weight.grad.full_tensor()[0, 0].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("order", [2.0, math.inf, -math.inf, 0.0])
@ranks(4)
def test_stages_may_have_no_gradients(rank: int, size: int, order: float) -> None:
    """The second is frozen, and without experts; all take part in the same reductions."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("pp", "ep"))
    own, expert = (nn.Parameter(torch.ones(3)) for _ in range(2))
    is_trained = rank < 2
    if is_trained:
        own.grad, expert.grad = torch.full((3,), 2.0), torch.full((3,), 4.0 + rank)
    over = {
        mesh.get_group("ep"): [expert] if is_trained else [],
        mesh.get_group("pp"): [own, expert],
    }
    every = [own, expert] if is_trained else []
    norm = clip_grad_norm_(every, 1.0, order, distinct_over=over)
    expected = {2.0: math.sqrt(3 * (4 + 16 + 25)), math.inf: 5.0, -math.inf: 2.0, 0.0: 3.0}
    assert norm.item() == pytest.approx(expected[order])
    if is_trained:
        factor = min(1.0, 1 / expected[order])
        assert own.grad is not None
        torch.testing.assert_close(own.grad, torch.full((3,), 2.0 * factor))


@pytest.mark.parametrize("order", [2.0, math.inf, -math.inf, 1.0, 0.0])
@ranks(2)
def test_complex_gradients_have_a_real_norm(rank: int, size: int, order: float) -> None:
    torch.manual_seed(0)
    ours = nn.Linear(4, 3, bias=False, dtype=torch.complex64)
    theirs = nn.Linear(4, 3, bias=False, dtype=torch.complex64)
    theirs.load_state_dict(ours.state_dict())
    fully_shard(ours)
    x = torch.randn(2, 4, dtype=torch.complex64)
    for module in (ours, theirs):
        module(x).abs().sum().backward()
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1, order)
    torch.testing.assert_close(clip_grad_norm_(ours.parameters(), 0.1, order), expected)
    assert ours.weight.grad is not None
    torch.testing.assert_close(full(ours.weight.grad), theirs.weight.grad)


@pytest.mark.parametrize("order", [2.0, math.inf, -math.inf])
@pytest.mark.parametrize("bad", [0, 1])
@ranks(2)
def test_a_norm_of_no_number_is_none(rank: int, size: int, bad: int, order: float) -> None:
    """gloo's largest of 1 and NaN is 1, where NaN is that of another rank."""
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    gradient: Any = model.weight.grad
    if rank == bad:
        gradient.to_local().fill_(math.nan)
    assert grad_norm(model.parameters(), order).isnan()
    with pytest.raises(NonFiniteError, match="gradients is nan"):
        clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)


@ranks(2)
def test_pending_sums_are_made_first(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    norm = clip_grad_norm_(weight, 1.0)
    assert norm.item() == pytest.approx(size * math.sqrt(3))
    assert full(weight.grad).norm().item() == pytest.approx(1.0, rel=1e-4)


@ranks(3)
def test_every_rank_hears_of_a_norm_that_is_not_finite(rank: int, size: int) -> None:
    model = shard(build(), fully_shard)
    loss_of(model, tokens_for(0, rank)).backward()
    gradient: Any = model.head.weight.grad
    if rank == size - 1:
        gradient.to_local()[0] = float("inf")
    before = full(model.blocks[0].up.weight.grad).clone()  # type: ignore[union-attr,arg-type]
    with pytest.raises(NonFiniteError, match=r"order 2\.0 of \d+ gradients is inf"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert torch.equal(full(model.blocks[0].up.weight.grad), before)  # type: ignore[union-attr,arg-type]
    assert clip_grad_norm_(model.parameters(), 1.0).isinf()


def test_nothing_to_clip_and_bad_orders() -> None:
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0, 0.0).item() == 0.0
    for order in (math.nan, "two", None):
        with pytest.raises(SettingError, match="norm_type must be a number"):
            clip_grad_norm_([], 1.0, order)  # type: ignore[arg-type]


@ranks(4)
def test_strided_shards_count_on_every_rank(rank: int, size: int) -> None:
    """What FSDP and tensor parallelism leave of one dim: each rank's rows count."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    rows = torch.arange(4.0)
    parameter = DTensor.from_local(
        rows[rank : rank + 1], mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False
    )
    parameter.grad = parameter.clone()
    assert clip_grad_norm_(parameter, math.inf).item() == pytest.approx(rows.norm().item())


@ranks(4)
def test_equal_meshes_are_one(rank: int, size: int) -> None:
    """torch may give back, for one mesh, an equal one that was made before, with other groups."""
    meshes = [
        init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
        for _ in range(3)
    ]
    values = torch.rand(64, generator=torch.Generator().manual_seed(rank))

    def parameters(of: Sequence[int]) -> list[DTensor]:
        made = []
        for index, value in zip(of, values, strict=True):
            mesh = meshes[index]
            parameter = DTensor.from_local(value[None], mesh, [Shard(0)] * 2, run_check=False)
            parameter.grad = parameter.clone()
            made.append(parameter)
        return made

    expected = grad_norm(parameters([0] * 64))
    for step in (1, 2, 5, 7):
        with counted_sums() as sums:
            mixed = parameters([index * step // 3 % 3 for index in range(64)])
            assert torch.equal(grad_norm(mixed), expected)
        assert len(sums) == 2, "one for each axis"
    # Ranks whose meshes were mixed up in different ways still add to each other.
    gradients = parameters([0] * 64)
    for parameter in gradients:
        parameter.grad = DTensor.from_local(
            parameter.to_local(), meshes[rank % 3], [Shard(0)] * 2, run_check=False
        )
    assert torch.equal(grad_norm(gradients), expected)


@contextmanager
def counted_sums() -> Iterator[list[Any]]:
    """All-reduces while it is open."""
    sums: list[Any] = []
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        sums.append(kwargs.get("group"))
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        yield sums


@pytest.mark.parametrize("shape", MESHES.values(), ids=list(MESHES))
@ranks(4)
def test_gradients_of_parameters_that_stay_gathered(
    rank: int, size: int, shape: tuple[int, ...]
) -> None:
    """After backward, or after an evaluation that followed it."""
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)
    reference = reference_of(size)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    for evaluates in (False, True):
        model: Any = shard(build(**SMALL), fully_shard, mesh=mesh, reshard_after_forward=False)
        stepped = dict(model.named_parameters())
        model.set_reshard_after_backward(evaluates)
        loss_of(model, tokens_for(0, rank)).backward()
        if evaluates:
            with torch.no_grad():
                loss_of(model, tokens_for(1, rank))
        assert any(held.grad is None for held in model.parameters())
        for norm in (grad_norm(model.parameters()), clip_grad_norm_(model.parameters(), 0.05)):
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
        for name, parameter in reference.named_parameters():
            gradient = stepped[name].grad
            assert gradient is not None
            torch.testing.assert_close(full(gradient), parameter.grad, msg=name)


@ranks(2)
def test_parameters_that_stay_gathered_are_saved_and_moved(rank: int, size: int) -> None:
    """What leads from them to sharded ones is not in files, and in no one's way."""
    model: Any = fully_shard(nn.Linear(4, 4))
    model.set_reshard_after_backward(False)
    model(torch.ones(1, 4)).sum().backward()
    with io.BytesIO() as file:
        torch.save(list(model.parameters()), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    for ours, theirs in zip(saved, model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert float(grad_norm(ours)) == 0.0
    model.to(torch.float64)
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    other = copy.copy(model.weight)
    assert float(grad_norm(other)) == 0.0
    assert float(grad_norm(model.weight)) > 0.0
