"""The guards of core over parameters, gradients and state that rest elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_toys import Recipe, assert_same_values, on, sharded_toy, tokens_for, train, wrapped
from toy_models import loss_of

from polyshard.errors import UnsupportedError
from polyshard_offload import Offload
from polyshard_resilience import Corruption, NonFinite
from polyshard_resilience.errors import CorruptionError, SkippedStepWarning
from polyshard_testing import ranks

RECIPE = Recipe(steps=4, clip=0.1)


def flip(value: Any, bit: int) -> None:
    memory = value.to_local().detach().data.view(-1).view(torch.uint8)
    memory[bit // 8] ^= 1 << bit % 8


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["host", "disk"])
@pytest.mark.parametrize("params", ["device", "host", "disk"])
@ranks(2)
def test_offloaded_training_is_guarded(
    rank: int, size: int, params: str, optimizer: str, tmp_path: Any
) -> None:
    """No alarm and no other bit in a training run; then a flip, and a bad gradient, are found."""
    models = []
    for guarded in (True, False):
        offload = on(str(tmp_path), optimizer, params)
        model: Any = sharded_toy(offload)
        stepped = wrapped(RECIPE.make_optimizer(model), offload)
        if guarded:
            guard = NonFinite(stepped, "skip", model=model)
            memory = Corruption(model, stepped, every=1)
            kept = stepped
        train(model, stepped, rank, RECIPE)
        models.append(model)
    assert guard.skipped == 0
    assert_same_values(*models)
    model = models[0]
    loss_of(model, tokens_for(90, rank)).backward()
    if rank == 1:
        model.blocks[0].up.weight.grad.to_local()[0, 0] = float("nan")
    with pytest.warns(SkippedStepWarning, match=r"'blocks\.0\.up\.weight' .* on rank 1"):
        kept.step()
    assert_same_values(*models)
    kept.zero_grad()
    state = kept.state[model.blocks[2].up.weight]["exp_avg"]
    if rank == 0:
        flip(state, 9)
    with pytest.raises(CorruptionError, match=r"'exp_avg' of 'blocks\.2\.up\.weight' .* rank 0"):
        memory.check()
    memory.rebase()
    if rank == 1 and params != "disk":  # those are in memory while they are used only
        flip(model.blocks[2].up.weight, 9)
    if params != "disk":
        with pytest.raises(CorruptionError, match=r"'blocks\.2\.up\.weight' .* on rank 1"):
            memory.check()


@ranks(2)
def test_steps_in_backward_are_refused(rank: int, size: int) -> None:
    offload = Offload(optimizer="host", step_in_backward=True)
    model = sharded_toy(offload)
    optimizer = wrapped(torch.optim.AdamW(model.parameters()), offload)
    with pytest.raises(UnsupportedError, match=r"NonFinite .* step_in_backward=False"):
        NonFinite(optimizer)
    with pytest.raises(UnsupportedError, match=r"Corruption .* step_in_backward=False"):
        Corruption(model, optimizer)
