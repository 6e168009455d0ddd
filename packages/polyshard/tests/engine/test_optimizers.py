"""Steps of optimizers that train nothing are refused or warned of; parameters are current after."""

from __future__ import annotations

import copy
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


@pytest.mark.parametrize("by", ["forward", "hand"])
@ranks(2)
def test_an_optimizer_of_gathered_parameters_is_refused_when_it_steps(
    rank: int, size: int, by: str
) -> None:
    """pytorch#149205: it holds unsharded parameters, whose gradients leave them."""
    model: Any = fully_shard(mlp())
    if by == "forward":
        model(torch.ones(2, 5))  # a backward would free the root
    else:
        model.unshard()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model.zero_grad()
    backward(model)
    with pytest.raises(LifecycleError, match=r"SGD was built while.*holds 4 .*\(0\.bias"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), 0.5).step()  # the backward has freed them


@ranks(2)
def test_gathered_parameters_added_to_an_optimizer_are_refused(rank: int, size: int) -> None:
    model: Any = sharded(mlp())
    optimizer = torch.optim.SGD(model[0].parameters(), 0.5)
    backward(model)
    optimizer.step()
    model[2].unshard()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(LifecycleError, match=r"holds 2 .*\(2\.bias, 2\.weight\)"):
        optimizer.step()


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def current(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in model.parameters()]


@pytest.mark.parametrize("size_of_step", ["whole", "one layer", "in backward"])
@ranks(3)
def test_parameters_after_a_step_are_those_that_were_stepped(
    rank: int, size: int, size_of_step: str
) -> None:
    """Weights that are published from ``parameters()`` while units are kept gathered."""
    plain = mlp()
    model: Any = sharded(copy.deepcopy(plain))
    model.set_reshard_after_backward(False)
    parts = (1, 3) if size_of_step == "one layer" else (0, 4)
    optimizers = [torch.optim.SGD(list(m.parameters())[slice(*parts)], 0.5) for m in (model, plain)]
    if size_of_step == "in backward":
        each = [torch.optim.SGD([p], 0.5) for p in model.parameters()]
        for optimizer in each:
            (held,) = optimizer.param_groups[0]["params"]
            held.register_post_accumulate_grad_hook(
                lambda p, o=optimizer: (o.step(), o.zero_grad())
            )
        optimizers = optimizers[1:]
    for _ in range(2):
        backward(model)
        backward(plain)
        for optimizer in optimizers:
            step(optimizer)
        for found, expected in zip(current(model), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected)


@ranks(2)
def test_parameters_gathered_by_hand_follow_a_step(rank: int, size: int) -> None:
    model: Any = sharded(mlp())
    plain = mlp()
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, plain)]
    for each in (model, plain):
        backward(each)
    for part in (model[0], model[2]):
        part.unshard()
    for optimizer in optimizers:
        optimizer.step()
    for found, expected in zip(current(model), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@ranks(2)
def test_what_a_step_leaves_alone_stays_gathered(rank: int, size: int) -> None:
    model: Any = mlp()
    model[0].requires_grad_(False)
    sharded(model).set_reshard_after_backward(False)  # type: ignore[operator]
    model.set_reshard_after_forward(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    backward(model)
    optimizer.step()
    assert [isinstance(p, DTensor) for p in model.parameters()] == [False, False, True, True]
