"""Loops that only run forward remember no more after thousands of them than after some."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from torch import nn

from polyshard import fully_shard
from polyshard_testing import World


def grows(rank: int, size: int, with_grad: bool) -> None:
    model: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(1, 2)

    def forwards(count: int) -> None:
        with torch.set_grad_enabled(with_grad):
            for _ in range(count):
                model(x)

    forwards(150)
    tracemalloc.start()
    try:
        forwards(150)
        before = tracemalloc.get_traced_memory()[0]
        forwards(1500)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 100_000, grown  # a note of every forward of five units takes 250,000 bytes

    model(x).sum().backward()
    reference = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    reference.load_state_dict({n: p.full_tensor() for n, p in model.state_dict().items()})
    reference(x).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("with_grad", [False, True])
def test_forwards_without_a_backward_are_not_remembered_for_ever(
    world1: World, with_grad: bool
) -> None:
    world1.run(grows, with_grad)
