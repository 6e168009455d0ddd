"""Checkpoints are native; what a reduction remembers is saved beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from quantized_models import build, shard, tokens_for, train
from toy_models import loss_of

from polyshard import describe, load_plugin_state_dict, plugin_state_dict
from polyshard.errors import SettingError
from polyshard_quantized import ErrorFeedback, Int4Block, QuantizedComm
from polyshard_testing import World, ranks


def _compensated() -> tuple[QuantizedComm, Any]:
    plugin = QuantizedComm(
        gradients=Int4Block(), error_feedback=ErrorFeedback(), rounding="stochastic", seed=5
    )
    return plugin, shard(build(), [plugin])


def resumable(rank: int, size: int) -> dict[str, Any]:
    plugin, model = _compensated()
    train(model, rank, steps=1)
    return plugin.state_dict()


def resumed_elsewhere(rank: int, size: int, states: list[dict[str, Any]]) -> str:
    """Refused on every rank; the plugin continues from zero, with the model's own checkpoint."""
    plugin, model = _compensated()
    describe(model)
    whole = {key: value for state in states for key, value in state.items()}
    with pytest.raises(SettingError) as caught:
        plugin.load_state_dict(whole)
    train(model, rank, steps=1)
    return str(caught.value)


def test_feedback_belongs_to_a_world_size(world2: World, world3: World) -> None:
    found = world3.run(resumed_elsewhere, world2.run(resumable))
    for rank in (0, 1):
        assert "saved on 2 ranks and cannot be loaded on 3" in found[rank]
    assert "has no 'rank2." in found[2]


@ranks(2)
def test_checkpoints_are_native(rank: int, size: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    plugin = QuantizedComm(gradients=Int4Block(), error_feedback=ErrorFeedback())
    model = shard(build(), [plugin])
    train(model, rank)
    masters = {n: p.full_tensor() for n, p in model.named_parameters()}
    dcp.save({"model": model.state_dict(), "quantized": plugin.state_dict()}, checkpoint_id=folder)
    plain = shard(build(7), [])
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder)  # without the plugin, and without its state
    plain.load_state_dict(state["model"])
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.full_tensor(), masters[name])


@ranks(2)
def test_a_checkpoint_collects_feedback_by_itself(rank: int, size: int, tmp_path: Path) -> None:
    """Three steps straight, and two after a checkpoint that knows no plugin, end alike."""
    folder = str(tmp_path / "checkpoint")
    _, model = _compensated()
    train(model, rank, steps=2)
    saved = {"model": model.state_dict(), "plugins": plugin_state_dict(model)}
    assert next(iter(saved["plugins"])).startswith(f"rank{rank}of2.quantized.")
    dcp.save(saved, checkpoint_id=folder)
    expected = train(model, rank, steps=2)
    _, resumed = _compensated()
    state = {"model": resumed.state_dict(), "plugins": plugin_state_dict(resumed)}
    dcp.load(state, checkpoint_id=folder)
    resumed.load_state_dict(state["model"])
    load_plugin_state_dict(resumed, state["plugins"])
    assert train(resumed, rank, steps=2) == expected
    for one, other in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())


def test_nothing_is_saved_where_nothing_is_remembered(world2: World) -> None:
    world2.run(forgetful)


def forgetful(rank: int, size: int) -> None:
    model = shard(build(), [QuantizedComm(gradients=Int4Block())])
    assert plugin_state_dict(model) == {}


@ranks(2)
def test_feedback_is_part_of_a_checkpoint(rank: int, size: int, tmp_path: Path) -> None:
    """Four steps straight, and two after a checkpoint, end alike."""
    folder = str(tmp_path / "checkpoint")
    losses = []
    for interrupt in (False, True):
        plugin, model = _compensated()
        losses.append(train(model, rank, steps=2))
        if interrupt:
            state = {"model": model.state_dict(), "quantized": plugin.state_dict()}
            dcp.save(state, checkpoint_id=folder)
            plugin, model = _compensated()
            describe(model)
            loss_of(model, tokens_for(9, rank)).backward()  # a resumed run holds state to fill
            model.zero_grad()
            state = {"model": model.state_dict(), "quantized": plugin.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state["model"])
            plugin.load_state_dict(state["quantized"])
        losses[-1] += train(model, rank, steps=2)
    assert losses[0] == losses[1]
