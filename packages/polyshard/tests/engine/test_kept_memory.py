"""Unsharded parameters at the same addresses in every step (``set_keep_unsharded_storage``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from toy_models import assert_same_parameters, build, loss_of, reset_together, shard, tokens_for

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard_testing import ranks

WIDE = {"width": 320, "hidden": 1000, "layers": 2}
"""Some groups above and some below the size from which memory is mapped (1 MiB)."""


def seen_by(model: nn.Module) -> list[dict[str, int]]:
    """Addresses of what each unit computes with, one entry a forward of the root."""
    seen: list[dict[str, int]] = []

    def note(module: nn.Module, args: Any, name: str) -> None:
        found = {f"{name}.{n}": p.data_ptr() for n, p in module.named_parameters(recurse=False)}
        seen[-1].update(found)

    model.register_forward_pre_hook(lambda m, a: seen.append({}))
    for name, module in model.named_modules():
        if module._parameters:
            module.register_forward_pre_hook(lambda m, a, name=name: note(m, a, name))
    return seen


def run(
    function: Callable[..., Any], rank: int, policy: MixedPrecisionPolicy, keep: bool
) -> tuple[nn.Module, list[dict[str, int]], list[Tensor]]:
    """Losses and addresses of a few steps, with other memory taken and freed in between."""
    model: Any = shard(build(**WIDE), function, mp_policy=policy, reshard_after_forward=True)
    if keep:
        model.set_keep_unsharded_storage(True)
    seen, losses, ballast = seen_by(model), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        loss = loss_of(model, tokens_for(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        ballast.append([torch.empty(n) for n in (1000, 300_000, 400_000)])
    return model, seen, losses


POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(torch.bfloat16)}


@pytest.mark.parametrize("policy", list(POLICIES))
@ranks(2)
def test_addresses_are_those_of_the_first_step(rank: int, size: int, policy: str) -> None:
    has_it = hasattr(torch_fsdp.FSDPModule, "set_keep_unsharded_storage")
    ours, seen, losses = run(fully_shard, rank, POLICIES[policy], keep=True)
    assert len(seen[0]) > 10
    assert seen == [seen[0]] * 4
    theirs, their, expected = run(torch_fsdp.fully_shard, rank, POLICIES[policy], keep=has_it)
    assert losses == expected
    assert_same_parameters(ours, theirs, exact=True)
    assert not has_it or their == [their[0]] * 4


@ranks(2)
def test_conversions_settings_and_resets_leave_them_there(rank: int, size: int) -> None:
    model: Any = shard(build(**WIDE), fully_shard)
    model.set_keep_unsharded_storage(True)
    seen = seen_by(model)
    loss_of(model, tokens_for(0, rank)).backward()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    loss_of(model, tokens_for(0, rank)).backward()
    model._apply(lambda t: t.clone())
    model.set_requires_gradient_sync(False)
    loss_of(model, tokens_for(0, rank)).backward()
    reset_together(model)
    loss_of(model, tokens_for(0, rank)).backward()
    assert seen == [seen[0]] * 4


@ranks(2)
def test_kept_memory_is_there_while_sharded_and_freed_on_request(rank: int, size: int) -> None:
    model: Any = fully_shard(nn.Linear(64, 64))
    weights: list[Tensor] = []
    model.register_forward_hook(lambda m, args, out: weights.append(m.weight))
    model.set_keep_unsharded_storage(True)
    model(torch.ones(1, 64)).sum().backward()
    expected = model.weight.full_tensor()
    assert model.weight is not weights[0], "the sharded parameter is registered"
    assert torch.equal(weights[0], expected)
    model.set_keep_unsharded_storage(False)
    with pytest.raises(RuntimeError):
        weights[0].sum()
    model(torch.ones(1, 64)).sum().backward()
    assert torch.equal(model.weight.full_tensor(), expected)
    assert weights[0] is weights[1]


@ranks(2)
def test_a_unit_alone_may_keep_its_memory(rank: int, size: int) -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for part in (*model, model):
        fully_shard(part, reshard_after_forward=True)
    weights: dict[int, Tensor] = {}
    for index, part in enumerate(model):
        part.register_forward_pre_hook(lambda m, a, i=index: weights.update({i: m.weight}))
    model[0].set_keep_unsharded_storage(True, recurse=False)
    model(torch.ones(1, 64)).sum().backward()
    assert torch.equal(weights[0], model[0].weight.full_tensor())
    with pytest.raises(RuntimeError):
        weights[1].sum()
    model.set_keep_unsharded_storage(True, recurse=False)
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(RuntimeError):
        weights[1].sum()
    model.set_keep_unsharded_storage(True)
    model(torch.ones(1, 64)).sum().backward()
    assert torch.equal(weights[1], model[1].weight.full_tensor())
