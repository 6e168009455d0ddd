"""Optimizers that keep more than their groups and state: numbers, and lists beside the groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from toy_optimizers import Shelf, same_bits

from polyshard.errors import UnsupportedError
from polyshard_optimizers import flat

SIZES = (64, 32, 7, 400_000, 300_000, 5)


class Scaled(Optimizer):
    """Counts steps on itself and in its groups, and has one scale for each group."""

    def __init__(self, params: Any, scales: list[float]) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0, "foreach": True})
        self.scales, self.steps = scales, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.newest = float(self.steps)
        for group, scale in zip(self.param_groups, self.scales, strict=True):
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 0.5)
                parameter.add_(state["mean"], alpha=-scale * group["lr"] / self.steps)


def groups_of(shelf: Shelf) -> list[dict[str, Any]]:
    return [{"params": shelf.params[a:b]} for a, b in ((0, 1), (1, 2), (2, 6))]


@pytest.mark.parametrize("idle", [0, 1, 5])
def test_every_part_begins_where_the_step_did(idle: int) -> None:
    """Parts of a step count it once, and find each group in its place, also one without any."""
    shelves = [Shelf(SIZES), Shelf(SIZES)]
    theirs, ours = (Scaled(groups_of(shelf), [1.0, 0.5, 0.25]) for shelf in shelves)
    flat(ours, elementwise=True)
    for index in range(4):
        for shelf, optimizer in zip(shelves, (theirs, ours), strict=True):
            shelf.give_gradients()
            if index != 3:
                shelf.params[idle].grad = None
            optimizer.step()
        assert ours.steps == theirs.steps == index + 1
        assert ours.newest == theirs.newest
        counts = [[g["count"] for g in optimizer.param_groups] for optimizer in (theirs, ours)]
        assert counts[0] == counts[1] == [index + 1] * 3
        for one, other in zip(*(shelf.params for shelf in shelves), strict=True):
            assert same_bits(one, other)


class Coupled(Optimizer):
    """Keeps a norm over all of its parameters, which no part knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.norms = torch.zeros(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        flat_gradients = torch.cat([parameter.grad.view(-1) for parameter in every])
        self.norms = torch.stack([flat_gradients.norm(order) for order in (1, 2)])
        for parameter in every:
            parameter.sub_(0.1 * parameter.grad / self.norms[1])


def test_what_parts_compute_differently_is_an_error() -> None:
    shelf = Shelf(SIZES, gap=3)
    optimizer = flat(Coupled([{"params": [p]} for p in shelf.params]), elementwise=True)
    shelf.give_gradients()
    with pytest.raises(UnsupportedError, match=r"Coupled computed its attribute 'norms' from some"):
        optimizer.step()
