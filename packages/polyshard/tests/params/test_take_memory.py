"""Memory for shards on the meta device, without a copy of what is in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from toy_models import build, full, loss_of, shard, tokens_for

from polyshard import fully_shard
from polyshard.engine.root import groups_of
from polyshard_testing import ranks


@ranks(2, 3)
def test_it_trains_as_after_to_empty(rank: int, size: int) -> None:
    """Objects stay, what was set on them too, and padding is zeros."""
    with torch.device("meta"):
        model = shard(build(), fully_shard)
    reference = shard(build(), fully_shard)
    device = next(reference.parameters()).device
    before: list[Any] = list(model.parameters())
    before[0].note = "kept"
    before[1].requires_grad_(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for group in groups_of(model):
        group.take_memory(device)
        buffer = group.shards.buffer
        used = sum(p.local_numel(rank) for p in group.shards.layout.parameters)
        for index in range(len(group.shards.parameters)):
            group.shards.local(index).fill_(1.0)
        assert int(buffer.sum()) == used
    after: list[Any] = list(model.parameters())
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert after[0].note == "kept"
    assert not after[1].requires_grad
    after[1].requires_grad_(True)
    model.load_state_dict(reference.state_dict())
    for step in range(2):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            loss_of(one, tokens_for(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(ours.detach()), full(theirs.detach()))


@ranks(2)
def test_what_has_values_keeps_them(rank: int, size: int) -> None:
    model: nn.Module = fully_shard(nn.Linear(4, 4))
    values = [full(p.detach()) for p in model.parameters()]
    (group,) = groups_of(model)
    group.take_memory(next(model.parameters()).device)
    for value, parameter in zip(values, model.parameters(), strict=True):
        assert torch.equal(full(parameter.detach()), value)
