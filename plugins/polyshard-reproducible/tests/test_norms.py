"""The norm of gradients over fixed rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reproducible_runs import mesh_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from polyshard import fully_shard
from polyshard._torch.private import strided_shard
from polyshard.errors import NonFiniteError
from polyshard.sharding.layout import chunk_bounds
from polyshard_reproducible import ReproducibleError, clip_grad_norm_, grad_norm
from polyshard_testing import World, ranks

SHAPES = ((37, 20), (5,), (), (1, 6), (0, 4), (3, 3, 7), (2000,))


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * 3 for shape in SHAPES]


def sharded(shape: tuple[int, ...], dim: int = 0) -> list[Tensor]:
    """Parameters on a mesh, with gradients."""
    found: list[Tensor] = []
    mesh = mesh_of(shape)
    for gradient in gradients():
        place = Shard(dim) if gradient.ndim > dim else Replicate()
        placements = [Replicate()] * (mesh.ndim - 1) + [place]
        whole = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        parameter = nn.Parameter(torch.zeros_like(whole))
        parameter.grad = whole
        found.append(parameter)
    return found


def norm_on(rank: int, size: int, shape: tuple[int, ...], dim: int) -> tuple[float, list[Tensor]]:
    """The norm, and what clipping leaves."""
    parameters = sharded(shape, dim)
    norm = clip_grad_norm_(parameters, 1.0)
    grads = [p.grad.full_tensor() for p in parameters if isinstance(p.grad, DTensor)]
    return float(norm), grads


@pytest.mark.parametrize("dim", [0, 1])
def test_norms_are_the_same_bits_on_every_mesh(world2: World, world4: World, dim: int) -> None:
    plain = [nn.Parameter(torch.zeros(s)) for s in SHAPES]
    for parameter, gradient in zip(plain, gradients(), strict=True):
        parameter.grad = gradient
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in gradients()))
    norm = float(grad_norm(plain))
    assert norm == pytest.approx(expected, rel=1e-7)
    runs = [
        *world2.run(norm_on, (2,), dim),
        *world4.run(norm_on, (4,), dim),
        *world4.run(norm_on, (2, 2), dim),
    ]
    if dim == 0:
        assert {found for found, _ in runs} == {norm}
    assert len({found for found, _ in runs}) == 1
    for _, grads in runs:
        for one, other in zip(grads, runs[0][1], strict=True):
            assert torch.equal(one, other)
    total = math.sqrt(sum(float(g.double().square().sum()) for g in runs[0][1]))
    assert total == pytest.approx(1.0, rel=1e-5)


def test_small_gradients_are_left_alone() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.1, 0.2, 0.2])
    assert float(clip_grad_norm_(parameter, 1.0)) == pytest.approx(0.3)
    assert torch.equal(parameter.grad, torch.tensor([0.1, 0.2, 0.2]))
    assert float(grad_norm(nn.Parameter(torch.zeros(3)))) == 0.0


def test_complex_gradients_have_two_parts() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.full((2,), 3 + 4j, dtype=torch.complex64)
    assert float(grad_norm(parameter)) == pytest.approx(math.sqrt(50))


def test_what_is_not_finite_is_told_first() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, math.inf])
    with pytest.raises(NonFiniteError, match="is inf"):
        clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    assert float(parameter.grad[0]) == 1.0


def in_pieces(whole: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Cut along ``dim`` by tensor parallelism, then by rows, as sharded parameters are."""
    dp, tp = (mesh.get_local_rank(axis) for axis in range(2))
    start, stop = chunk_bounds(whole.shape[dim], mesh.size(1), tp)
    piece = whole.narrow(dim, start, stop - start)
    start, stop = chunk_bounds(piece.shape[0], mesh.size(0), dp)
    rows = strided_shard(0, mesh.size(1)) if dim == 0 else Shard(0)
    return DTensor.from_local(
        piece[start:stop].clone(),
        mesh,
        [rows, Shard(dim)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def norm_of_pieces(rank: int, size: int, shape: tuple[int, ...]) -> float:
    """Of matrices that both axes divide, along one dim and along two, and of one that one does."""
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=("dp", "tp"))
    parameters = []
    for gradient in (g for g in gradients() if g.ndim > 1):
        whole = distribute_tensor(gradient, mesh, [Shard(0), Replicate()], src_data_rank=None)
        for found in (in_pieces(gradient, mesh, 0), in_pieces(gradient, mesh, 1), whole):
            parameters.append(nn.Parameter(torch.zeros_like(found)))
            parameters[-1].grad = found
    return float(grad_norm(parameters))


def test_norms_of_tensor_parallel_pieces(world2: World, world4: World) -> None:
    found = {*world2.run(norm_of_pieces, (1, 2)), *world4.run(norm_of_pieces, (2, 2))}
    expected = 3 * sum(float(g.double().square().sum()) for g in gradients() if g.ndim > 1)
    assert len(found) == 1
    assert found.pop() == pytest.approx(math.sqrt(expected), rel=1e-7)


def refuse_other_orders(rank: int, size: int) -> None:
    """Rows that were cut before tensor parallelism was: pieces are other ones on more ranks."""
    mesh = mesh_of((2, 2))
    for places in ([Shard(0), Shard(0)], [Partial(), Shard(0)], [Shard(0), Partial()]):
        whole = distribute_tensor(torch.ones(8, 8), mesh, [Replicate()] * 2, src_data_rank=None)
        parameter = nn.Parameter(torch.zeros_like(whole))
        given: Any = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
        parameter.grad = DTensor.from_local(torch.ones(2, 8), mesh, places, **given)
        with pytest.raises(ReproducibleError, match="no rows that stay whole"):
            grad_norm(parameter)


def test_rows_that_are_cut_twice_are_refused(world4: World) -> None:
    world4.run(refuse_other_orders)


@ranks(2)
def test_clipping_while_parameters_stay_gathered(rank: int, size: int) -> None:
    model: Any = fully_shard(nn.Linear(5, 3))
    stepped = list(model.parameters())
    model.set_reshard_after_backward(False)
    model(torch.ones(1, 5)).sum().backward()  # gradients of ones
    norm = math.sqrt(18.0)
    assert float(clip_grad_norm_(model.parameters(), norm / 2)) == pytest.approx(norm)
    assert float(grad_norm(stepped)) == pytest.approx(norm / 2)
