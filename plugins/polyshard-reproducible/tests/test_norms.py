"""The norm of gradients over fixed rows."""

from __future__ import annotations

import math

import pytest
import torch
from reproducible_runs import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from polyshard.errors import NonFiniteError
from polyshard.testing import World
from polyshard_reproducible import ReproducibleError, clip_grad_norm_, grad_norm

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


def test_what_is_not_finite_is_told_first() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, math.inf])
    with pytest.raises(NonFiniteError, match="is inf"):
        clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    assert float(parameter.grad[0]) == 1.0


def refuse_two_axes(rank: int, size: int) -> None:
    mesh = mesh_of((2, 2))
    whole = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    parameter = nn.Parameter(torch.zeros_like(whole))
    parameter.grad = whole
    with pytest.raises(ReproducibleError, match="no rows that stay whole"):
        grad_norm(parameter)


def test_parameters_that_two_axes_divide_are_refused(world4: World) -> None:
    world4.run(refuse_two_axes)
