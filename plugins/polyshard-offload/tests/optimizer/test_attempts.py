"""Attempts that fail leave what is offloaded where it was, even in the middle of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offload_toys import (
    Recipe,
    assert_same_state,
    assert_same_values,
    on,
    sharded_toy,
    tokens_for,
    without,
    wrapped,
)
from toy_attempts import failure, raising
from toy_models import loss_of

import polyshard_resilience
from polyshard_offload import DiskSettings, Offload, OffloadError
from polyshard_optimizers.stepping.twins import Twins
from polyshard_resilience.errors import AttemptError
from polyshard_testing import ranks

RECIPE = Recipe(steps=4, schedule=False)
KINDS: dict[str, dict[str, Any]] = {
    "host": {"optimizer": "host"},
    "parameters on the host": {"optimizer": "host", "params": "host"},
    "disk": {},
    "all on disk": {"params": "disk"},
    "half of it": {"fraction": 0.5},
    "in backward": {"step_in_backward": True, "params": "host"},
    "in backward, on disk": {"step_in_backward": True, "params": "disk"},
}


@pytest.mark.sampled(3)
@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_failures_change_nothing(rank: int, size: int, tmp_path: Path, kind: str) -> None:
    """Before every step one fails: in backward, in the step half way, and after it."""
    plain, expected, losses = without(rank, size, RECIPE)
    checks = DiskSettings(path=tmp_path, checksums=True)
    offload = on(str(tmp_path), disk=checks, **KINDS[kind])
    model: Any = sharded_toy(offload, RECIPE)
    optimizer = wrapped(RECIPE.make_optimizer(model), offload)
    found: list[float] = []

    def backward() -> None:
        loss = loss_of(model, tokens_for(step * 10, rank))
        loss.backward()
        found.append(loss.item())

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def whole() -> None:
        backward()
        finish()

    for step in range(RECIPE.steps):
        attempt = polyshard_resilience.attempt(model, optimizer)
        if step % 2:
            failure(attempt, raising(ValueError("after"), whole), "ValueError: after")
        else:
            with pytest.MonkeyPatch.context() as patched:
                _break_off(patched, after=1)
                failure(attempt, whole, "OSError: half way")
        found = found[:step]
        with polyshard_resilience.attempt(model, optimizer):
            whole()
    assert found == losses
    assert_same_values(model, plain)
    assert_same_state(optimizer, expected)


def _break_off(patched: pytest.MonkeyPatch, after: int) -> None:
    """Have steps fail when they come to other parts than the first ``after``."""
    original, seen = Twins.step, []

    def broken(self: Twins, *given: Any) -> None:
        seen.append(self)
        if len(seen) > after:
            raise OSError("half way")
        original(self, *given)

    patched.setattr(Twins, "step", broken)


@ranks(1)
def test_without_copies_it_is_final(rank: int, size: int, tmp_path: Path) -> None:
    offload: Offload = on(str(tmp_path))
    model: Any = sharded_toy(offload)
    optimizer = wrapped(torch.optim.AdamW(model.parameters()), offload)
    loss_of(model, tokens_for(0, rank)).backward()
    with pytest.MonkeyPatch.context() as patched:
        _break_off(patched, after=1)
        error = failure(
            polyshard_resilience.attempt(model, optimizer, undo_steps=False), optimizer.step
        )
    assert not error.is_undone
    with pytest.raises(OffloadError, match="failed half way"):
        optimizer.step()
    assert isinstance(error, AttemptError)
