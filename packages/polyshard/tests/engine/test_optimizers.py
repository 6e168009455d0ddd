"""Steps of optimizers that would train nothing are refused, or warned of."""

from __future__ import annotations

import copy
import warnings
import weakref

import pytest
import torch
from torch import nn

from polyshard import fully_shard
from polyshard.errors import IneffectiveSettingWarning, LifecycleError
from polyshard_testing import ranks


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


def sharded(model: nn.Sequential) -> nn.Sequential:
    for part in (model[0], model[2], model):
        fully_shard(part)
    return model


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 5)).square().mean().backward()


@ranks(2)
def test_an_optimizer_from_before_is_refused_when_it_steps(rank: int, size: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sharded(model)
    backward(model)
    with pytest.raises(LifecycleError, match=r"this SGD was built before fully_shard.*0\.weight"):
        optimizer.step()


@ranks(2)
def test_parameters_may_be_exchanged_in_an_optimizer(rank: int, size: int) -> None:
    plain = mlp()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sharded(model)
    backward(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.step()
    backward(plain)
    torch.optim.SGD(plain.parameters(), 0.5).step()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)  # type: ignore[attr-defined]


@ranks(2)
def test_optimizers_of_other_models_step(rank: int, size: int) -> None:
    model, other = mlp(), mlp()
    kept = list(model.parameters())  # alive, but in no optimizer
    before = [p.detach().clone() for p in other.parameters()]
    optimizer = torch.optim.SGD(other.parameters(), 0.5)
    backward(sharded(model))
    backward(other)
    optimizer.step()
    assert len(kept) == 4
    for found, was in zip(other.parameters(), before, strict=True):
        assert not torch.equal(found, was)


@ranks(2)
def test_what_was_replaced_is_freed(rank: int, size: int) -> None:
    model = mlp()
    originals = [weakref.ref(p) for p in model.parameters()]
    sharded(model)
    assert [original() for original in originals] == [None] * 4


@ranks(2)
def test_a_step_that_misses_gradients_is_warned_of(rank: int, size: int) -> None:
    model = sharded(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    backward(model)
    with pytest.warns(IneffectiveSettingWarning, match=r"wait to be reduced.*does not see them"):
        optimizer.step()
    model.set_requires_gradient_sync(True)  # type: ignore[operator]
    backward(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@ranks(2)
def test_other_optimizers_step_while_gradients_wait(rank: int, size: int) -> None:
    model = sharded(mlp())
    last = torch.optim.SGD(model[2].parameters(), 0.5)
    model[0].set_requires_gradient_sync(False)  # type: ignore[operator]
    backward(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        last.step()
