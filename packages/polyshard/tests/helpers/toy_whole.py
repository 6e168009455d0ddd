"""Optimizers in the manner of those that people use, as short as what matters about them allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Elementary(Optimizer):
    """Steps each parameter by ``update(gradient, weight, state)``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, gradient: Tensor, weight: Tensor, state: dict[str, Any]) -> Any:
        """What is subtracted, times the learning rate."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    update = self.update(weight.grad, weight, self.state[weight])
                    weight.add_(update, alpha=-group["lr"])


def _mean(state: dict[str, Any], name: str, value: Tensor, beta: float) -> Tensor:
    """Moving, kept in the state."""
    if name not in state:
        state[name] = torch.zeros_like(value)
    kept: Tensor = state[name].mul_(beta).add_(value, alpha=1 - beta)
    return kept


class Lion(Elementary):
    """The sign of a moving mean: each element by itself."""

    def update(self, gradient: Tensor, weight: Tensor, state: dict[str, Any]) -> Any:
        return _mean(state, "exp_avg", gradient, 0.9).sign()


class Lamb(Elementary):
    """Adam, scaled by the norms of weight and update."""

    def update(self, gradient: Tensor, weight: Tensor, state: dict[str, Any]) -> Any:
        mean = _mean(state, "exp_avg", gradient, 0.9)
        square = _mean(state, "exp_avg_sq", gradient * gradient, 0.99)
        update = mean / (square.sqrt() + 1e-6)
        return update * (weight.norm() / update.norm())


class LARS(Elementary):
    """Gradients scaled by the norms of weight and gradient, read as numbers."""

    def update(self, gradient: Tensor, weight: Tensor, state: dict[str, Any]) -> Any:
        return gradient * (weight.norm().item() / gradient.norm().item())


class CAME(Elementary):
    """The square's mean from those of rows and columns."""

    def update(self, gradient: Tensor, weight: Tensor, state: dict[str, Any]) -> Any:
        square = gradient * gradient
        rows = _mean(state, "rows", square.mean(1, keepdim=True), 0.9)
        columns = _mean(state, "columns", square.mean(0, keepdim=True), 0.9)
        return gradient / (rows * columns / rows.mean()).sqrt()


class Shampoo(Elementary):
    """The inverse root of the rows' products, by eigenvectors."""

    def update(self, gradient: Tensor, weight: Tensor, state: dict[str, Any]) -> Any:
        products = _mean(state, "products", gradient @ gradient.T, 0.9)
        values, vectors = torch.linalg.eigh(products)
        roots = values.clamp(min=1e-3).rsqrt()
        return (vectors * roots) @ vectors.T @ gradient


class Orthogonal(Elementary):
    """Newton-Schulz steps on the matrix, as Muon makes them."""

    def update(self, gradient: Tensor, weight: Tensor, state: dict[str, Any]) -> Any:
        found = gradient / gradient.norm()
        for _ in range(5):
            found = 1.5 * found - 0.5 * found @ found.T @ found
        return found


class Blockwise(Elementary):
    """A moving mean in 8 bits, with a scale for every 16 elements of the flat tensor."""

    def update(self, gradient: Tensor, weight: Tensor, state: dict[str, Any]) -> Any:
        mean = _mean(state, "exp_avg", gradient, 0.9)
        blocks = [_rounded(block) for block in mean.reshape(-1).split(16)]
        mean.copy_(torch.cat(blocks).view(mean.shape))
        return mean


def _rounded(block: Tensor) -> Tensor:
    scale = block.abs().max().clamp(min=1e-12) / 127
    return (block / scale).round() * scale


class Prodigy(Elementary):
    """One learning rate for all, from how gradients and ways so far go together."""

    def update(self, gradient: Tensor, weight: Tensor, state: dict[str, Any]) -> Any:
        if "start" not in state:
            state["start"] = weight.detach().clone()
        together = ((state["start"] - weight) * gradient).sum()
        return gradient * (1.0 + together.abs())
