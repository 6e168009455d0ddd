"""Parameters that are frozen while their gradients wait to be reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from toy_models import full

from polyshard import fully_shard
from polyshard_quantized import Exclusions, Int8Block, QuantizedComm
from polyshard_testing import ranks


def gradients(rank: int, plugins: list[object]) -> list[Tensor]:
    """Of one weight, in three steps whose second micro-batch it is frozen for."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    for module in (*model, model):
        fully_shard(module, plugins=plugins)
    found: list[Tensor] = []
    weight: Any = model[0].weight
    for step in range(3):  # from the second on, memory of sums is used again
        x = torch.randn(8, 512, generator=torch.Generator("cpu").manual_seed(10 * step + rank))
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            weight.requires_grad_(not is_last)
            model(x.to(torch.get_default_device())).square().sum().backward()
        assert weight.grad is not None
        found.append(full(weight.grad).clone())
        weight.requires_grad_(True)
        model.zero_grad()
    return found


@ranks(2)
def test_what_waits_of_a_frozen_parameter_is_sent(rank: int, size: int) -> None:
    exclude = Exclusions(min_numel=0)
    plugin = QuantizedComm(weights=None, gradients=Int8Block(), exclude=exclude)
    for ours, native in zip(gradients(rank, [plugin]), gradients(rank, []), strict=True):
        assert 0 < (ours - native).norm() < 0.05 * native.norm()
