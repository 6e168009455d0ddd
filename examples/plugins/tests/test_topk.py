"""A fraction of the elements travels; nothing is lost, only late."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gallery_training import Reductions, mean_gradient, train, whole
from torch import Tensor, nn

from polyshard import fully_shard
from polyshard_gallery.topk import TopKGradients
from polyshard_testing import PluginConformance, ranks


def everything() -> TopKGradients:
    return TopKGradients(fraction=1.0)


class TestEverythingIsExact(PluginConformance):
    host_waits = 3  # flags of the parameters that have a gradient are copied to the device

    @pytest.fixture
    def factory(self) -> Callable[[], object]:
        return everything


class TestConformance(PluginConformance):
    host_waits = 3
    tolerance = 1.0  # most elements of a first step are left out
    loss_tolerance = 0.5
    bias_steps = 80  # an element of twenty is sent

    @pytest.fixture
    def factory(self) -> Callable[[], object]:
        return TopKGradients


@ranks(2, 3)
def test_what_is_left_behind_follows(rank: int, size: int) -> None:
    errors = []
    for steps in (1, 80):
        found, expected = mean_gradient(rank, size, steps, TopKGradients(0.1))
        errors.append(float((found - expected).norm() / expected.norm()))
    assert errors[0] > 0.5
    assert errors[1] < 0.1


@ranks(2)
def test_it_converges_and_sends_what_it_says(rank: int, size: int) -> None:
    seen = Reductions()
    losses = train(rank, 150, TopKGradients(0.1), seen)
    assert losses[-1] < 0.01 * losses[0]
    elements = 64 * 48 // size
    kept = -(-elements // 10)
    assert set(seen.sent) == {(size - 1) * kept * (4 + 4)}


@ranks(2)
def test_wide_values_are_aligned(rank: int, size: int) -> None:
    """An odd number of positions of four bytes beside values of eight."""
    torch.manual_seed(0)
    model: Any = nn.Linear(5, 3).double()
    fully_shard(model, plugins=[TopKGradients(1.0)])
    x = torch.ones(2, 5, dtype=torch.float64) * (rank + 1)
    model(x).sum().backward()
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((3,), 2.0, dtype=torch.float64))
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((3, 5), 3.0).double())


class Two(nn.Module):
    """Two matrices whose gradients are as large as the caller says; all elements alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, first: float, second: float | None) -> Tensor:
        out: Tensor = first * self.first(torch.eye(8)).sum()
        return out if second is None else out + second * self.second(torch.eye(8)).sum()


@ranks(2)
def test_what_is_kept_waits_for_the_next_gradient(rank: int, size: int) -> None:
    model = Two()
    fully_shard(model, plugins=[TopKGradients(0.5)])
    for first, second, arrives in ((100.0, 1.0, 0.0), (100.0, None, None), (0.0, 1.0, 2.0)):
        model(first, second).backward()
        if arrives is None:
            assert model.second.weight.grad is None
        else:
            found = whole(model.second.weight.grad)
            torch.testing.assert_close(found, torch.full((8, 8), arrives))
        model.zero_grad()


@ranks(2)
def test_a_step_that_overflowed_is_forgotten(rank: int, size: int) -> None:
    model = Two()
    fully_shard(model, plugins=[TopKGradients(0.5)])
    model(float("inf"), None).backward()
    assert not whole(model.first.weight.grad).isfinite().any()
    model.zero_grad()
    model(1.0, None).backward()
    assert whole(model.first.weight.grad).isfinite().all()


def test_a_fraction_is_checked() -> None:
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got 5"):
        TopKGradients(5)
