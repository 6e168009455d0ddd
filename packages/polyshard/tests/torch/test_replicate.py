"""Torch's composable ``replicate`` inside, around and beside sharded units, as with torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as ddp_replicate
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from toy_models import Model, build, full, loss_of, tokens_for

from polyshard import FSDPModule, describe, fully_shard
from polyshard._torch.engine_state import is_replicated, register_sharded
from polyshard_testing import ranks

try:
    from torch.distributed._composable.replicate_with_fsdp import replicate as fsdp_replicate
except ImportError:  # torch 2.11 has no such
    fsdp_replicate = None  # type: ignore[assignment]

Call = Callable[[Any], Any]
KINDS: dict[str, Any] = {"ddp": ddp_replicate, "fsdp": fsdp_replicate}
PRESENT = [kind for kind, call in KINDS.items() if call is not None]


def inside(model: Model, sharded: Call, replicated: Call) -> None:
    """A replicated block of a sharded model."""
    replicated(model.blocks[1])
    sharded(model.blocks[0])
    sharded(model)


def around(model: Model, sharded: Call, replicated: Call) -> None:
    """Sharded blocks of a replicated model."""
    for block in model.blocks:
        sharded(block)
    replicated(model)


def beside(model: Model, sharded: Call, replicated: Call) -> None:
    """Every part one or the other; the model itself is neither."""
    sharded(model.embedding)
    replicated(model.blocks[0])
    sharded(model.blocks[1])
    replicated(model.blocks[2])
    sharded(model.head)


@pytest.mark.parametrize("kind", PRESENT)
@pytest.mark.parametrize("arrange", [inside, around, beside])
@ranks(2)
def test_trains_as_with_torchs_own(rank: int, size: int, arrange: Any, kind: str) -> None:
    replicated = KINDS[kind]
    runs, values = [], []
    for engine in (torch_fully_shard, fully_shard):
        model = build()
        arrange(model, engine, replicated)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        losses = []
        for step in range(3):
            loss = loss_of(model, tokens_for(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append(losses)
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.reshard()
        values.append({name: full(p.detach()) for name, p in model.named_parameters()})
    assert runs[1] == runs[0]
    assert values[1].keys() == values[0].keys()
    assert all(torch.equal(values[1][name], value) for name, value in values[0].items())


@ranks(2)
def test_what_is_replicated_is_in_no_unit(rank: int, size: int) -> None:
    model = build()
    inside(model, fully_shard, ddp_replicate)
    planned = {p.fqn for plan in describe(model).groups for p in plan.parameters}
    assert not any(name.startswith("blocks.1.") for name in planned)
    assert any(name.startswith("blocks.0.") for name in planned)
    weight: Tensor = model.get_parameter("blocks.1.up.weight")
    assert type(weight) is nn.Parameter


@ranks(2)
def test_one_module_cannot_be_both(rank: int, size: int) -> None:
    for engine in (torch_fully_shard, fully_shard):
        module: Any = engine(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            ddp_replicate(module)
        with pytest.raises(AssertionError):
            torch_fully_shard(module)
    replicated: Any = ddp_replicate(nn.Linear(2, 2))
    parameters = list(replicated.parameters())
    fully_shard(replicated)  # as torch's: nothing is left to shard
    held = list(replicated.parameters())
    assert all(now is before for now, before in zip(held, parameters, strict=True))
    assert isinstance(replicated, FSDPModule)


def test_the_registry() -> None:
    module = nn.Linear(2, 2)
    assert not is_replicated(module)
    register_sharded(module)
    register_sharded(module)
    assert not is_replicated(module)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        ddp_replicate(module)
