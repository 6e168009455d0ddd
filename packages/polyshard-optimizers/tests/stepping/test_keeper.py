"""A plugin keeps the state of some parameters, and lends them when they are stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from toy_optimizers import EVERY, Shelf, runs_of, same_bits
from typing_extensions import override

from polyshard_optimizers.stepping import Lent, OptimizerKeeper, SteppedOptimizer, Stepper

SIZES = [64, 33, 7, 128, 300_001, 16]


class Drawer(OptimizerKeeper):
    """Keeps the state of every other parameter, and steps two of those at a time."""

    error = RuntimeError
    remedy = "Do without the drawer."

    def __init__(self, optimizer: Optimizer, *, pins: bool = False) -> None:
        self.optimizer, self.pins = optimizer, pins
        self.stepper = Stepper(optimizer)
        self.every = [p for group in optimizer.param_groups for p in group["params"]]
        self.kept: dict[int, dict[str, Any]] = {}
        self.settled: list[bool] = []
        self.stepper.take_over(optimizer, SteppedOptimizer, self)

    @override
    def is_lent(self, parameter: Tensor) -> bool:
        return any(parameter is p for p in self.every[::2])

    @override
    def is_pinned(self, parameter: Tensor) -> bool:
        return self.pins

    @override
    def step(self, closure: Callable[[], Any] | None) -> None:
        self.stepper.twins.begin()
        own = self.optimizer.state  # some torch's Adagrad makes it at once
        lent = [Lent(p, 0, dict(self.kept.get(id(p), own.get(p, {})))) for p in self.every[::2]]
        for start in range(0, len(lent), 2):
            self.stepper.lend(lent[start : start + 2])
        for one in lent:
            self.kept[id(one.key)] = self.optimizer.state[one.key] = one.state
        self.settled = [one.is_settled for one in lent]
        self.stepper.step_runs()
        self.stepper.twins.end()


@pytest.mark.parametrize("name", EVERY)
def test_what_is_lent_is_stepped_as_torch_does(name: str) -> None:
    shelves = [Shelf(SIZES) for _ in range(2)]
    ours, theirs = (EVERY[name](shelf.params) for shelf in shelves)
    drawer = Drawer(ours)
    for _ in range(4):
        for shelf in shelves:
            shelf.give_gradients()
        ours.step()
        theirs.step()
    for one, other in zip(*(shelf.params for shelf in shelves), strict=True):
        assert same_bits(one, other)
        for entry, value in theirs.state[other].items():
            found = ours.state[one][entry]
            assert same_bits(found, value) if isinstance(value, Tensor) else found == value
    with_state = [index for index, p in enumerate(shelves[1].params) if theirs.state[p]]
    places = {id(p): index for index, p in enumerate(shelves[0].params)}
    assert [places[id(p)] for p, state in ours.state.items() if state] == with_state
    assert all(drawer.settled) or not with_state


def test_pinned_state_stays_where_it_is() -> None:
    shelf = Shelf(SIZES)
    optimizer = optim.AdamW(shelf.params)
    Drawer(optimizer, pins=True)
    places = []
    for _ in range(3):
        shelf.give_gradients()
        optimizer.step()
        states = [optimizer.state[p]["exp_avg"] for p in shelf.params[1::2]]
        places.append([state.data_ptr() for state in states])
    assert places[0] == places[1] == places[2]
    assert runs_of(optimizer) == [1, 1, 1]


class Coupled(optim.AdamW):
    """Sets what its groups say by the parameters it sees."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] = float(sum(p.grad.sum() for p in group["params"]))


def test_the_keeper_says_what_couples() -> None:
    shelf = Shelf(SIZES)
    optimizer = Coupled(shelf.params)
    Drawer(optimizer)
    shelf.give_gradients()
    with pytest.raises(RuntimeError, match=r"computed 'seen' of .* Do without the drawer"):
        optimizer.step()


@pytest.mark.parametrize("threads", [1, 2])
def test_narrow_parameters_are_not_cut(threads: int) -> None:
    """Where threads cut them shows in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shelves = [Shelf([600_062], torch.bfloat16) for _ in range(2)]
        ours, theirs = (EVERY["SGD momentum"](shelf.params) for shelf in shelves)
        Drawer(ours)
        for _ in range(6):
            for shelf in shelves:
                shelf.give_gradients()
            ours.step()
            theirs.step()
        assert same_bits(shelves[0].params[0], shelves[1].params[0])
    finally:
        torch.set_num_threads(before)
