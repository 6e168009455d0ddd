"""What error feedback keeps: without a gradient, and of models that share a plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quantized_models import build, shard, train
from torch import Tensor, nn

from polyshard import fully_shard
from polyshard.errors import SettingError
from polyshard_quantized import ErrorFeedback, Exclusions, Int4Block, QuantizedComm
from polyshard_testing import ranks


class Branches(nn.Module):
    """Two matrices; each forward names those it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(16, 64))
        self.b = nn.Parameter(torch.ones(16, 64))

    def forward(self, weights: dict[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, n) * w).sum() for n, w in weights.items()]).sum()


def residuals(plugin: QuantizedComm) -> dict[str, Tensor]:
    (state,) = plugin.state_dict().values()
    return {name: value.view(16, 64).clone() for name, value in state["residuals"].items()}


@pytest.mark.parametrize("zeros", [False, True])
@ranks(2)
def test_errors_of_parameters_without_a_gradient_are_kept(
    rank: int, size: int, zeros: bool
) -> None:
    """All that was ever asked for is in ``.grad`` or still in the errors of some rank."""
    plugin = QuantizedComm(
        weights=None,
        gradients=Int4Block(),
        error_feedback=ErrorFeedback(),
        exclude=Exclusions(min_numel=0),
    )
    model: Any = fully_shard(Branches(), plugins=[plugin])
    model.set_reduce_scatter_unused_params(zeros)
    asked = {name: torch.zeros(16, 64) for name in "ab"}
    found = {name: torch.zeros(16, 64) for name in "ab"}
    for step, uses in enumerate(("ab", "a", "a", "ab", "b", "ab")):
        generator = torch.Generator().manual_seed(10 * step + rank)
        weights = {name: torch.randn(16, 64, generator=generator) for name in uses}
        before = residuals(plugin) if step else {}
        model(weights).backward()
        for name, parameter in model.named_parameters():
            if name in weights:
                asked[name] += weights[name]
            if parameter.grad is not None:
                found[name] += parameter.grad.full_tensor() * size
            elif before:
                assert torch.equal(residuals(plugin)[name], before[name])
                assert bool(before[name].any())
        model.zero_grad()
    for name, left in residuals(plugin).items():
        total = asked[name] - left
        dist.all_reduce(total)
        torch.testing.assert_close(found[name], total, rtol=1e-5, atol=1e-4)


@ranks(2)
def test_two_models_may_share_a_plugin_with_feedback(rank: int, size: int, tmp_path: Path) -> None:
    """One plugin object, two models of one class: states are told apart, and saved apart."""
    folder = str(tmp_path / "checkpoint")
    plugin = QuantizedComm(gradients=Int4Block(), error_feedback=ErrorFeedback())
    models = [shard(build(seed), [plugin]) for seed in range(2)]
    losses = [train(model, rank, steps=2 + i) for i, model in enumerate(models)]
    with pytest.raises(SettingError, match="serves several models"):
        plugin.state_dict()
    states = [plugin.state_dict(model) for model in models]
    assert [s[f"rank{rank}.(root)"]["calls"] for s in states] == [2, 3]
    saved = {
        str(i): {"model": m.state_dict(), "quantized": s}
        for i, (m, s) in enumerate(zip(models, states, strict=True))
    }
    dcp.save(saved, checkpoint_id=folder)
    losses = [train(model, rank, steps=2) for model in models]
    again = QuantizedComm(gradients=Int4Block(), error_feedback=ErrorFeedback())
    resumed = [shard(build(seed + 7), [again]) for seed in range(2)]
    for model in resumed:
        train(model, rank, steps=1)  # so that there is state to fill
    states = [again.state_dict(model) for model in resumed]
    filled = {
        str(i): {"model": m.state_dict(), "quantized": s}
        for i, (m, s) in enumerate(zip(resumed, states, strict=True))
    }
    dcp.load(filled, checkpoint_id=folder)
    with pytest.raises(SettingError, match="serves several models"):
        again.load_state_dict(states[0])
    for index, model in enumerate(resumed):
        model.load_state_dict(filled[str(index)]["model"])
        again.load_state_dict(filled[str(index)]["quantized"], model)
    assert [train(model, rank, steps=2) for model in resumed] == losses


@ranks(2)
def test_reports_tell_models_apart(rank: int, size: int) -> None:
    """A group belongs to one model in reports and errors too, whatever the other leaves out."""
    plugin = QuantizedComm(gradients=Int4Block())
    first, second = shard(build(0), [plugin]), shard(build(1), [plugin])
    for parameter in first.blocks[0].parameters():
        parameter.requires_grad_(False)
    train(first, rank, steps=1)
    train(second, rank, steps=1)
    assert [g.name for g in plugin.report().groups] == ["blocks.0", "blocks.1", "(root)"] * 2
    for group in plugin.report().groups:
        assert group.gather is not None
        assert group.reduce is not None
        assert group.gather.group == group.reduce.group == group.name
    errors = [plugin.relative_errors(model) for model in (first, second)]
    assert errors[0].keys() == errors[1].keys()
    assert errors[0] != errors[1]
