"""Ties that ``fully_shard`` cannot keep, because a module outside of all units has the original."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from polyshard import fully_shard
from polyshard.errors import LifecycleError, UntiedWarning
from polyshard_testing import ranks


class Tied(nn.Module):
    """A body and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.body[0].weight  # type: ignore[assignment]


def step(model: Any) -> None:
    model(torch.ones(1, 4)).sum().backward()


def told(model: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UntiedWarning)
        step(model)
    return [str(w.message) for w in caught if w.category is UntiedWarning]


@ranks(2)
def test_a_module_of_the_model_that_ignores_it(rank: int, size: int) -> None:
    """The root covers it, and both names are said."""
    model: Any = Tied()
    fully_shard(model.body)
    fully_shard(model, ignored_params={model.head.weight})
    model.forward = lambda x: model.head(model.body(x))
    (text,) = told(model)
    assert text.startswith("'head' keeps as its weight what 'body.0.weight' was")
    assert told(model) == []


@ranks(2)
def test_a_module_outside_of_the_model(rank: int, size: int) -> None:
    model = Tied()
    fully_shard(model.body)
    (text,) = told(model.body)
    assert text.startswith("a Linear outside of the model keeps as its weight what '0.weight' was")
    assert text.endswith("filter polyshard.errors.UntiedWarning.")


@ranks(2)
def test_an_optimizer_of_both_is_refused(rank: int, size: int) -> None:
    model = Tied()
    fully_shard(model.body)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert len(told(model.body)) == 1
    with pytest.raises(LifecycleError, match="holds 1 of the parameters that it replaced"):
        optimizer.step()


@ranks(2)
def test_what_nothing_can_use_is_not_told(rank: int, size: int) -> None:
    """A module that waits for the garbage collector, and originals held by something else."""
    gc.disable()
    try:
        model = Tied()
        held = model.body[1].weight
        lost = nn.Linear(4, 4)
        lost.weight = model.body[0].weight  # type: ignore[assignment]
        lost.myself = [lost]  # type: ignore[assignment]
        del lost
        body = fully_shard(model.body)
        del model
        assert told(body) == []
        assert held.shape == (4, 4)
    finally:
        gc.enable()


@ranks(2)
def test_ties_that_are_kept_are_not_told(rank: int, size: int) -> None:
    model: Any = Tied()
    fully_shard(model.body)
    fully_shard(model.head)
    fully_shard(model)
    model.forward = lambda x: model.head(model.body(x))
    assert told(model) == []
    assert model.head.weight is model.body[0].weight
