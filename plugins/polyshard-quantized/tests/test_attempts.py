"""Attempts that fail leave errors that are fed back, and noise, where they were."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from quantized_models import build, shard, tokens_for
from torch import Tensor
from toy_attempts import failure, raising
from toy_models import loss_of

import polyshard_resilience
from polyshard_quantized import ErrorFeedback, Exclusions, Int4Block, QuantizedComm
from polyshard_testing import ranks


@ranks(2)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_training_goes_on_as_if_nothing_had_failed(rank: int, size: int, rounding: Any) -> None:
    found = []
    for fails in (False, True):
        plugin = QuantizedComm(
            gradients=Int4Block(),
            rounding=rounding,
            error_feedback=ErrorFeedback(),
            exclude=Exclusions(min_numel=0),
        )
        torch.manual_seed(0)
        model: Any = shard(build(), [plugin])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            backward = partial(_backward, model, step, rank)
            if fails:
                error = ValueError(f"step {step}")
                body = raising(error, backward, optimizer.step) if rank == 0 else backward
                said = f"rank 0: ValueError: step {step}"
                failure(polyshard_resilience.attempt(model, optimizer), body, said)
            with polyshard_resilience.attempt(model, optimizer):
                backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((_whole(model), plugin.state_dict()))
    for name, value in found[0][0].items():
        assert torch.equal(found[1][0][name], value), name
    assert str(found[0][1]) == str(found[1][1])
    kept = [state["residuals"] for state in found[0][1].values()]
    assert any(value.abs().max() > 0 for each in kept for value in each.values())


def _backward(model: Any, step: int, rank: int) -> None:
    loss_of(model, tokens_for(step, rank)).backward()


def _whole(model: Any) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
