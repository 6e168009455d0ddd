"""What is gathered before it is used, and how much at once."""

from __future__ import annotations

from typing import Any

import torch
from toy_models import build, loss_of, shard, tokens_for
from toy_units import Tree, states

from polyshard import fully_shard
from polyshard.engine.root import units_below
from polyshard.group.group import State
from polyshard.module.schedule import own_unit
from polyshard_testing import ranks


@ranks(2)
def test_no_more_than_two_units_are_gathered(rank: int, size: int) -> None:
    """At most two units besides the root are gathered at any moment, in forward and backward."""
    model = shard(build(width=24, hidden=30, layers=3), fully_shard)
    counts: list[int] = []

    def count(*args: Any) -> None:
        units = [u for name, _, u in units_below(model) if name]
        counts.append(sum(not u.is_sharded() for u in units))

    for block in model.blocks:
        block.register_forward_pre_hook(count)
        block.register_full_backward_hook(count)
    for step in range(3):  # later steps replay the order of the first
        loss_of(model, tokens_for(step, rank)).backward()
        assert states(model) == {State.SHARDED}
    assert max(counts) == 2


@ranks(2)
def test_the_order_of_forwards_is_replayed(rank: int, size: int) -> None:
    """From the second step on, a unit's gather starts before it runs; results do not change."""
    model: Any = Tree()
    for unit in model.units:
        fully_shard(unit)
    fully_shard(model)
    ahead: list[bool] = []

    def look(module: Any, args: Any) -> None:
        following = model.units[(list(model.units).index(module) + 1) % 4]
        ahead.append(not own_unit(following).is_sharded())

    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(rank))
    for unit in model.units:
        unit.register_forward_pre_hook(look)
    reference = Tree()
    for program in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3], [0, 2, 1, 3]):
        with torch.no_grad():
            torch.testing.assert_close(model(x, program), reference(x, program))
        assert states(model) == {State.SHARDED}
    assert ahead[:4] == [False] * 4, "the first forward records"
    assert ahead[4:7] == [True] * 3, "the second follows"
