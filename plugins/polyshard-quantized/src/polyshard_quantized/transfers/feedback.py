"""Error feedback: what quantization left out of one reduction is added to the next.

Source of the method: Seide et al., "1-bit stochastic gradient descent" (2014); with a decayed
error, LoCo (arXiv 2407.04480).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyshard.errors import SettingError
from polyshard_quantized.layout.payload import Payload


@dataclass(frozen=True)
class ErrorFeedback:
    """Keeps, on every rank, the error of its *whole* unsharded gradient in ``float32``.

    That is ``world_size`` times a shard: opt in where 4-bit gradients are worth that memory. With
    loss scaling the error is in scaled units and carries over a change of the scale.

    Attributes:
        decay: the error is multiplied by this before it is added.
        reset_every: reductions of a group after which its error starts from zero; ``None``: never.

    Raises:
        SettingError: for values that make no feedback.
    """

    decay: float = 1.0
    reset_every: int | None = None

    def __post_init__(self) -> None:
        """Refuse what would grow errors, or keep none."""
        decay: object = self.decay
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
            raise SettingError(
                f"ErrorFeedback: decay must be above 0 and at most 1, got {decay!r}; 1 keeps all "
                "of the error."
            )
        reset: object = self.reset_every
        if reset is not None and (
            isinstance(reset, bool) or not isinstance(reset, int) or reset < 1
        ):
            raise SettingError(
                f"ErrorFeedback: reset_every must be a whole number from 1 or None, got {reset!r}."
            )


class Residuals:
    """The errors of one group on one rank, by parameter index: ``[W, chunk_numel]`` each."""

    def __init__(self, settings: ErrorFeedback) -> None:
        self.settings = settings
        self.values: dict[int, Tensor] = {}

    def prepare(self, plan: Payload, world_size: int, calls: int, device: torch.device) -> None:
        """Before a reduction of ``plan``: start anew when it is time to."""
        reset = self.settings.reset_every
        if reset is not None and calls % reset == 0:
            for value in self.values.values():
                value.zero_()
        self.make_room(plan, world_size, device)

    def make_room(self, plan: Payload, world_size: int, device: torch.device) -> None:
        """Start from zero for every parameter of ``plan`` that has no error yet."""
        for quantized in plan.quantized:
            numel = sum(tile.elements for tile in quantized.tiles)
            held = self.values.get(quantized.index)
            if held is None or held.shape != (world_size, numel) or held.device != device:
                shape = (world_size, numel)
                self.values[quantized.index] = torch.zeros(shape, device=device)

    def keep(self, residual: Tensor, wanted: Tensor, sent: Tensor) -> None:
        """``residual = (wanted - sent) * decay``; zero where that is not finite.

        A value that is not finite was sent and is visible; kept, it would spoil every later step.
        """
        torch.sub(wanted, sent, out=residual)
        if self.settings.decay != 1.0:
            residual.mul_(self.settings.decay)
        residual.nan_to_num_(0.0, 0.0, 0.0)
