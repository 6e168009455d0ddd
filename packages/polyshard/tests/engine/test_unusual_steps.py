"""Steps that few loops make, against one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from toy_models import full
from typing_extensions import override

from polyshard import fully_shard
from polyshard_testing import ranks


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def two_of(make: Any) -> tuple[Any, Any]:
    """A model, and another with the same values."""
    torch.manual_seed(0)
    ours, theirs = make(), make()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, ours_), theirs_ in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (ours_.grad is None) == (theirs_.grad is None), name
        if ours_.grad is not None:
            torch.testing.assert_close(full(ours_.grad), theirs_.grad, msg=name)


class Region(nn.Module):
    """Recomputes two units of which the loss uses the first."""

    def __init__(self) -> None:
        super().__init__()
        self.top = linear()
        self.used = nn.Sequential(linear(), nn.Tanh(), linear())
        self.unused = nn.Sequential(linear(), nn.Tanh(), linear())

    def region(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.region, self.top(x), use_reentrant=False)[0]
        return out


@ranks(2)
def test_a_recomputation_may_stop_early(rank: int, size: int) -> None:
    """torch ends it by an exception within the second unit, while the first one's backward runs."""
    ours, theirs = two_of(Region)
    for module in (ours.used, ours.unused, ours):
        fully_shard(module)
    for _ in range(2):
        for model in (ours, theirs):
            model(torch.linspace(-1, 1, 8).view(2, 4)).sum().backward()
    same_gradients(ours, theirs)
    assert all(isinstance(p, DTensor) for p in ours.parameters())  # nothing is left gathered


def pair() -> nn.Sequential:
    return nn.Sequential(linear(), linear())


@ranks(2)
def test_a_step_sees_all_gradients_though_backwards_may_follow(rank: int, size: int) -> None:
    ours, theirs = two_of(pair)
    fully_shard(ours[0])
    fully_shard(ours)
    ours.set_is_last_backward(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for x in (torch.ones(1, 4), torch.zeros(1, 4)):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model(x).sum().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step()
        same_gradients(ours, theirs)
        for optimizer in optimizers:
            optimizer.zero_grad()


@ranks(2)
def test_a_conversion_between_backwards(rank: int, size: int) -> None:
    ours, theirs = two_of(pair)
    fully_shard(ours[0])
    fully_shard(ours)
    ours.set_is_last_backward(False)
    for model in (ours, theirs):
        model(torch.ones(1, 4)).sum().backward()
        model.to(torch.float64)
    ours.set_is_last_backward(True)
    for model in (ours, theirs):
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize("is_frozen", [True, False], ids=["unfreeze", "freeze"])
@ranks(2)
def test_kept_parameters_may_be_frozen_between_backwards(
    rank: int, size: int, is_frozen: bool
) -> None:
    """They stay gathered, so that no gather tells the unsharded ones."""
    ours, theirs = two_of(pair)
    for module in (ours[0], ours):
        fully_shard(module, reshard_after_forward=False)
    held = [next(iter(m.parameters())) for m in (ours, theirs)]
    ours.set_reshard_after_backward(False)
    for micro in range(2):
        ours.set_requires_gradient_sync(micro == 1)
        for model, parameter in zip((ours, theirs), held, strict=True):
            parameter.requires_grad_(is_frozen == bool(micro))
            model(torch.ones(1, 4)).sum().backward()
    for module in (ours[0], ours):
        module.reshard()
    same_gradients(ours, theirs)


class First(nn.Linear):
    @override
    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Ignores(nn.Module):
    """A unit that does not use its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.side, self.main = linear(), linear(), First(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.main(self.before(x), self.side(x))
        return out


@ranks(2)
def test_an_input_that_a_unit_ignores_gets_no_gradient(rank: int, size: int) -> None:
    """Zeros would decay the weights of what made it."""
    ours, theirs = two_of(Ignores)
    fully_shard(ours.main)
    fully_shard(ours)
    for model in (ours, theirs):
        model(torch.ones(1, 4)).sum().backward()
    assert theirs.side.weight.grad is None
    same_gradients(ours, theirs)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


@pytest.mark.parametrize("name", ["first.weight", "second.weight"])
@ranks(2)
def test_a_shared_parameter_may_be_assigned_under_any_name(rank: int, size: int, name: str) -> None:
    model: Any = fully_shard(Tied())
    value = torch.full_like(model.state_dict()[name], 7.0)
    model.load_state_dict({name: value}, strict=False, assign=True)
    model(torch.ones(1, 4))
    assert model.first.weight is model.second.weight
    assert full(model.first.weight.detach()).eq(7.0).all()
