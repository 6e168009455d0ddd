"""The tree does not know where ranks begin."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyshard_reproducible.errors import ReproducibleError
from polyshard_reproducible.ranks import Position
from polyshard_reproducible.tree import NEUTRAL, TreeSum, sum_halves, sum_rows

powers = st.integers(0, 3).map(lambda k: 2**k)


def by_hand(leaves: list[Tensor]) -> Tensor:
    """The tree, from its definition."""
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return by_hand(leaves[:half]) + by_hand(leaves[half:])


def leaves_of(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 20, (count, 5), generator=generator)
    return list(torch.randn(count, 5, generator=generator) * 2.0**exponents)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@settings(deadline=None, max_examples=50)
@given(powers, powers, powers, st.integers(0, 99))
def test_every_partition_gives_the_sum_by_hand(
    turns: int, shards: int, replicas: int, seed: int
) -> None:
    slots = turns * shards * replicas
    leaves = leaves_of(slots, seed)
    halves = []
    for replica in range(replicas):
        tree = TreeSum()
        for turn in range(turns):
            own = [Position(shards, replicas, s, replica).slot(turn, slots) for s in range(shards)]
            tree.add(sum_rows(torch.stack([leaves[slot] for slot in own])))
            assert tree.held <= math.log2(turns) + 1
        halves.append(tree.take())
    assert same_bits(sum_rows(torch.stack(halves)), by_hand(leaves))


@given(powers, powers, powers)
def test_every_slot_is_run_once(turns: int, shards: int, replicas: int) -> None:
    slots = turns * shards * replicas
    ranks = [Position(shards, replicas, s, r) for r in range(replicas) for s in range(shards)]
    run = [p.slot(turn, slots) for p in ranks for turn in range(p.turns(slots))]
    assert sorted(run) == list(range(slots))


def test_one_after_another_is_another_sum() -> None:
    leaves = leaves_of(16, 0)
    assert not same_bits(sum(leaves[1:], leaves[0]), by_hand(leaves))


@given(st.floats(width=32, allow_nan=False))
def test_the_neutral_element_changes_no_bit(value: float) -> None:
    number = torch.full((3,), value)
    filled = torch.empty(3).fill_(NEUTRAL)
    assert same_bits(filled + number, number)
    assert same_bits(number + filled, number)
    assert same_bits(filled / 8, filled)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 9))
def test_halves_sum_a_row_alike_wherever_it_lies(length: int, rows: int, seed: int) -> None:
    values = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed))
    together = sum_halves(values.clone())
    alone = torch.stack([sum_halves(row.clone()) for row in values])
    assert same_bits(together.contiguous(), alone.contiguous())
    torch.testing.assert_close(together, values.sum(-1))


@pytest.mark.parametrize(
    ("position", "says"),
    [
        (Position(3), "3 ranks on its shard axis"),
        (Position(2, 3), "3 ranks on its replicate axis"),
        (Position(8, 2), r"Give Reproducible\(slots=16\) or more"),
    ],
    ids=str,
)
def test_ranks_that_do_not_divide_the_tree_are_refused(position: Any, says: str) -> None:
    with pytest.raises(ReproducibleError, match=says):
        position.check(8, "the group of 'weight'")
