"""What a cell does: on a sharded model on ranks, or in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

STEPS = 2
MAX_NORM = 0.1
EVALUATION = 900
"""Index of the batch that is evaluated."""


class Trainee(Protocol):
    """Something that can be trained."""

    def backward(self, index: int, micro_batches: int, *, last: bool) -> list[float]:
        """Forward and backward of one of several micro-batches; the losses of the parts."""

    def clip(self, max_norm: float) -> float:
        """Clip the gradients; their norm before."""

    def step(self) -> None:
        """Step the optimizer and drop the gradients."""

    def evaluate(self, index: int) -> list[float]:
        """Losses of a forward in eval mode."""

    def tensors(self) -> dict[str, Tensor]:
        """Whole parameters and optimizer state, by name."""


@dataclass
class Outcome:
    """What a training showed. Losses are those of one part, or of every part in turn."""

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def train(trainee: Trainee, feature: str) -> Outcome:
    """The steps of a cell."""
    outcome = Outcome()
    micro_batches = 2 if feature == "accumulation" else 1
    for step in range(STEPS):
        for micro in range(micro_batches):
            index, last = step * micro_batches + micro, micro == micro_batches - 1
            outcome.losses.append(trainee.backward(index, micro_batches, last=last))
        if feature == "clipping":
            outcome.norms.append(trainee.clip(MAX_NORM))
        trainee.step()
        if feature == "evaluation":
            outcome.losses.append(trainee.evaluate(EVALUATION + step))
    outcome.tensors = trainee.tensors()
    return outcome
