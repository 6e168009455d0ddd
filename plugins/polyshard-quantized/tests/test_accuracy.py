"""Trainings end where native ones do; for long ones see ``benchmarks/quantized/accuracy.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from quantized_models import VOCABULARY, build, shard
from torch import Tensor

from polyshard_quantized import Int8Block, QuantizedComm
from polyshard_testing import World

STEPS, SEEDS = 60, 3


def text(seed: int, count: int) -> Tensor:
    """``[count, 24]`` tokens of a chain whose next token depends on the last one."""
    generator = torch.Generator().manual_seed(5)
    likely = torch.randint(0, VOCABULARY, (VOCABULARY, 2), generator=generator)
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCABULARY, (count,), generator=generator)]
    for _ in range(23):
        choice = torch.randint(0, 2, (count,), generator=generator)
        rows.append(likely[rows[-1], choice])
    return torch.stack(rows, 1)


def held_out(rank: int, seed: int, plugins: Sequence[object]) -> float:
    """Loss of predicting the next token, of text that was not trained on, after training."""
    model: Any = shard(build(seed), plugins)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        next_token(model, text(1000 * seed + 2 * step + rank, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(next_token(model, text(999_999, 256)))


def next_token(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def trained(rank: int, size: int) -> tuple[list[float], list[float]]:
    native, int8 = (
        [held_out(rank, seed, plugins) for seed in range(SEEDS)]
        for plugins in ([], [QuantizedComm(gradients=Int8Block())])
    )
    return native, int8


@pytest.mark.thorough
def test_losses_end_within_the_spread_of_seeds(world2: World) -> None:
    native, int8 = world2.run(trained, timeout=180.0)[0]
    spread = max(native) - min(native)
    untrained = math.log(VOCABULARY)
    assert max(native) < 0.5 * untrained, "nothing was learnt, so nothing is compared"
    differences = [abs(a - b) for a, b in zip(int8, native, strict=True)]
    assert 0 < max(differences) < 0.01
    assert sum(differences) / SEEDS < spread
