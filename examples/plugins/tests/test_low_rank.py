"""Two thin factors travel; error feedback makes up for what they miss."""

from collections.abc import Callable

import pytest
import torch
from gallery_training import Reductions, mean_gradient, train, whole
from torch import nn

from polyshard import describe, fully_shard
from polyshard_gallery.low_rank import LowRankGradients
from polyshard_testing import PluginConformance, ranks


def wide() -> LowRankGradients:
    return LowRankGradients(rank=1000)  # more than any matrix has: nothing is factored


class TestWhatStaysWholeIsExact(PluginConformance):
    @pytest.fixture
    def factory(self) -> Callable[[], object]:
        return wide


class TestConformance(PluginConformance):
    tolerance = 1.0  # a random matrix is far from rank 4
    loss_tolerance = 0.5

    @pytest.fixture
    def factory(self) -> Callable[[], object]:
        return LowRankGradients


@ranks(2, 3)
def test_what_factors_miss_follows(rank: int, size: int) -> None:
    errors = []
    for steps in (1, 80):
        found, expected = mean_gradient(rank, size, steps, LowRankGradients(4))
        errors.append(float((found - expected).norm() / expected.norm()))
    assert errors[0] > 0.5
    assert errors[1] < 0.1


@ranks(2)
def test_it_converges_and_sends_what_it_says(rank: int, size: int) -> None:
    seen = Reductions()
    losses = train(rank, 150, LowRankGradients(4), seen)
    assert losses[-1] < 0.01 * losses[0]
    assert set(seen.sent) == {(size - 1) * 4 * 4 * (64 // size + 48)}


@ranks(2)
def test_a_gradient_of_low_rank_arrives(rank: int, size: int) -> None:
    """A chunk whose rank is no more than that of the factors is what a power step finds whole."""
    model = nn.Linear(48, 64, bias=False)
    fully_shard(model, plugins=[LowRankGradients(2)])
    assert "low_rank_gradients" in str(describe(model))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 48, generator=generator)
    y = torch.randn(2, 64, generator=generator)
    (model(x) * y).sum().backward()
    own = y.T @ x
    both = [torch.empty_like(own) for _ in range(size)]
    torch.distributed.all_gather(both, own)
    torch.testing.assert_close(
        whole(model.weight.grad), (both[0] + both[1]) / 2, rtol=1e-4, atol=1e-4
    )
