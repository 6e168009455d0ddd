"""Ranks that start from different values: an error naming the parameter, where asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toy_models import build, loss_of, shard, tokens_for

import polyshard
from polyshard import SameValues, describe, fully_shard
from polyshard.errors import PlanMismatchError
from polyshard_testing import World, ranks

SMALL = {"width": 8, "hidden": 10, "layers": 2}


def differing(rank: int, size: int, shape: tuple[int, ...], odd: int) -> str | None:
    """One element of one parameter of one rank is off by the last bit."""
    mesh = init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )
    model = build(**SMALL)
    if rank == odd:
        with torch.no_grad():
            value = model.blocks[1].up.weight[3, 2]  # type: ignore[union-attr, index]
            value.copy_(torch.nextafter(value, torch.tensor(9.0)))
    shard(model, fully_shard, mesh=mesh, plugins=[SameValues()])
    if odd < 0:
        loss_of(model, tokens_for(0, rank)).backward()
        return None
    with pytest.raises(PlanMismatchError) as caught:
        loss_of(model, tokens_for(0, rank))
    return str(caught.value)


@pytest.mark.parametrize("odd", [-1, 0, 3])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
def test_ranks_are_compared(world4: World, shape: tuple[int, ...], odd: int) -> None:
    for text in world4.run(differing, shape, odd):
        if odd < 0:
            assert text is None
            continue
        changed = [line for line in text.splitlines() if line[:1] in "+-"]
        assert len(changed) == 2  # that parameter, as seen by the two sides
        assert all("parameter blocks.1.up.weight" in line for line in changed)


@ranks(2)
def test_parameters_without_values_are_listed(rank: int, size: int) -> None:
    """On the meta device there is nothing to compare, which is said."""
    with torch.device("meta"):
        model: Any = nn.Linear(3, 3)
    with pytest.warns(polyshard.errors.IneffectiveSettingWarning, match="meta device"):
        fully_shard(model, plugins=[SameValues()])
    model.to_empty(device=torch.get_default_device())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    (plan,) = describe(model).groups
    assert any("SameValues compares nothing of weight, bias" in n for n in plan.notices)
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
