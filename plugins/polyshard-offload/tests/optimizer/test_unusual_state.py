"""Optimizers that keep more than plain tensors by parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offload_toys import on, wrapped
from torch import Tensor, nn
from torch.optim import Optimizer


class Codes(Tensor):
    """Eight bits an element, with the scale that they need."""

    scale: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Codes:
        scale = values.abs().max().clamp(min=1e-12) / 127
        codes: Codes = (values / scale).round().to(torch.int8).as_subclass(cls)
        codes.scale = scale
        return codes

    def values(self) -> Tensor:
        return self.as_subclass(Tensor).float() * self.scale


class EightBit(Optimizer):
    """Keeps one moment in eight bits, and one in full."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["codes"] = Codes.of(torch.zeros_like(parameter))
                    state["mean"] = torch.zeros_like(parameter)
                moment = 0.9 * state["codes"].values() + parameter.grad
                state["codes"] = Codes.of(moment)
                state["mean"].lerp_(moment, 0.5)
                parameter.add_(state["mean"], alpha=-group["lr"])


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_state_of_another_class_stays(tmp_path: Path, tier: str, in_backward: bool) -> None:
    found = []
    for offload in (None, on(str(tmp_path), tier, step_in_backward=in_backward)):
        params = [nn.Parameter(torch.linspace(-1, 1, 40).reshape(8, 5)) for _ in range(3)]
        optimizer = wrapped(EightBit(params), offload)
        for step in range(4):
            sum((p * (i + step)).square().sum() for i, p in enumerate(params)).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            assert all(type(optimizer.state[p]["codes"]) is Codes for p in params)
        found.append((params, [optimizer.state[p] for p in params]))
    for theirs, ours in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(theirs, ours)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one["codes"].values(), other["codes"].values())
        assert torch.equal(one["mean"], other["mean"])


class Scaled(Optimizer):
    """Counts steps on itself, and has one scale for each group beside them."""

    def __init__(self, params: Any, scales: list[float]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.scales, self.steps = scales, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group, scale in zip(self.param_groups, self.scales, strict=True):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 0.5)
                parameter.add_(state["mean"], alpha=-scale * group["lr"] / self.steps)


@pytest.mark.parametrize("in_backward", [False, True])
def test_attributes_count_once_a_step(tmp_path: Path, in_backward: bool) -> None:
    """Every parameter is a chunk; all chunks of a step begin with the same attributes."""
    found = []
    for offload in (None, on(str(tmp_path), step_in_backward=in_backward)):
        params = [nn.Parameter(torch.linspace(-1, 1, 400)) for _ in range(4)]
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        optimizer = wrapped(Scaled(groups, [1.0, 0.5]), offload)
        for step in range(4):
            sum((p * (i + step)).square().sum() for i, p in enumerate(params)).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.steps == step + 1  # type: ignore[attr-defined]
        found.append(params)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
