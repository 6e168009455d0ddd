"""A kept payload is sent again only while the shard holds what was encoded, in that order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantized_models import build, shard, tokens_for
from torch import nn
from toy_models import loss_of

from polyshard_quantized import Exclusions, Int8Block, QuantizedComm
from polyshard_testing import ranks

Parameters = list[nn.Parameter]
"""As an optimizer got them: a root that stays gathered shows others."""


def local_parts(parameters: Parameters) -> list[torch.Tensor]:
    return [p.data.to_local() for p in parameters]  # type: ignore[attr-defined]


def permute_rows(parameters: Parameters) -> None:
    for part in local_parts(parameters):
        part.copy_(part.flip(0).clone())


def permute_words(parameters: Parameters) -> None:
    for part in local_parts(parameters):
        part.copy_(part.roll(2, -1).clone())


def negate(parameters: Parameters) -> None:
    for part in local_parts(parameters):
        part.neg_()


def average(parameters: Parameters) -> None:
    values = [p.detach() for p in parameters]
    torch._foreach_lerp_(values, [torch.ones_like(v) for v in values], 0.25)


def step(parameters: Parameters) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter.detach())
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    optimizer.step()
    optimizer.zero_grad()


WRITERS: list[Callable[[Parameters], None]] = [permute_rows, permute_words, negate, average, step]


@pytest.mark.parametrize("reshard", [True, False])
@ranks(2)
def test_kept_payloads_follow_every_write(rank: int, size: int, reshard: bool) -> None:
    """As a model that was just loaded with the same values, which has no payload to send again."""

    def made() -> Any:
        plugin = QuantizedComm(weights=Int8Block(32), exclude=Exclusions(min_ndim=0, min_numel=0))
        return shard(build(), [plugin], reshard_after_forward=reshard)

    model = made()
    parameters = list(model.parameters())
    for write in WRITERS:
        for trains in (False, True):
            with torch.set_grad_enabled(trains):
                loss_of(model, tokens_for(0, rank))
            write(parameters)
            fresh = made()
            fresh.load_state_dict(model.state_dict())
            with torch.set_grad_enabled(trains):
                found = [loss_of(m, tokens_for(1, rank)) for m in (model, fresh)]
            if trains:
                for loss in found:
                    loss.backward()
                for parameter in parameters:
                    parameter.grad = None
            assert found[0].item() == found[1].item(), write.__name__
