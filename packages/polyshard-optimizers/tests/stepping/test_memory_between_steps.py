"""Memory that a plan remembers is the parameters' own, and holds what they say it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from toy_optimizers import Shelf, runs_of, same_bits

from polyshard_optimizers import flat

SIZES = (64, 200_000, 7)


class Counted(Optimizer):
    """Counts its steps in a Python number, and keeps a mean in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 0.1)
                parameter.add_(state["mean"], alpha=-group["lr"] / state["step"])


def test_state_beside_a_python_counter_keeps_its_memory() -> None:
    """The counter changes in every step; the mean is the same tensor, over memory that it owns."""
    shelves = [Shelf(SIZES), Shelf(SIZES)]
    theirs, ours = (Counted(shelf.params) for shelf in shelves)
    flat(ours, elementwise=True)
    held: list[Tensor] = []
    junk: list[Tensor] = []
    for _ in range(5):
        for shelf, optimizer in zip(shelves, (theirs, ours), strict=True):
            shelf.give_gradients()
            optimizer.step()
        means = [ours.state[parameter]["mean"] for parameter in shelves[1].params]
        held = held or means
        assert all(one is other for one, other in zip(held, means, strict=True))
        # Memory that a step has freed by mistake is overwritten here.
        junk += [torch.full((sum(SIZES),), torch.nan) for _ in range(4)]
        junk += [torch.full_like(parameter, torch.nan) for parameter in shelves[1].params]
        for one, other in zip(*(shelf.params for shelf in shelves), strict=True):
            assert same_bits(one, other)
            assert theirs.state[one]["step"] == ours.state[other]["step"]
            assert same_bits(theirs.state[one]["mean"], ours.state[other]["mean"])


def conjugate(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient.conj()


def negate(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = torch._neg_view(gradient)


def widen(parameter: Tensor, gradient: Tensor) -> None:
    """To another dtype than the parameter's, which torch allows through ``.data``."""
    parameter.grad = gradient
    parameter.grad.data = gradient.to(torch.complex128)


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("give", [conjugate, negate, widen])
def test_gradients_whose_memory_holds_other_values(
    give: Callable[[Tensor, Tensor], None], begin: int
) -> None:
    """Lazily conjugated or negated, or of another dtype: from the first step on, or later."""
    results = []
    for is_flat in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [
            nn.Parameter(torch.randn(8, dtype=torch.complex64, generator=generator))
            for _ in range(3)
        ]
        optimizer = SGD(params, lr=0.1)
        if is_flat:
            flat(optimizer)
        given = [torch.zeros_like(parameter) for parameter in params]
        for index in range(4):
            for parameter, gradient in zip(params, given, strict=True):
                gradient.copy_(torch.randn(8, dtype=torch.complex64, generator=generator))
                parameter.grad = gradient
                if index >= begin:
                    give(parameter, gradient.clone())
            optimizer.step()
        results.append([parameter.detach() for parameter in params])
    for one, other in zip(*results, strict=True):
        assert same_bits(torch.view_as_real(one), torch.view_as_real(other))


def test_plans_stay_while_gradients_are_plain() -> None:
    shelf = Shelf((64, 32))
    optimizer = flat(SGD(shelf.params, lr=0.1))
    for _ in range(3):
        shelf.give_gradients()
        optimizer.step()
    assert runs_of(optimizer) == [2]
