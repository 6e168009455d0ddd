"""What a run has measured so far, as plain data that checkpoints carry along."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

__all__ = ["Evaluation", "History", "Step"]


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        step: Counted from 1.
        loss: Mean over all ranks and micro-batches, nats per byte.
        norm: Global gradient norm before clipping.
        lr: Learning rate used.
        tokens: Bytes of text over all ranks.
        seconds: Wall time of the step on rank 0.
    """

    step: int
    loss: float
    norm: float
    lr: float
    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second over all ranks."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Evaluation:
    """Mean loss on held-out text after a step, nats per byte."""

    step: int
    loss: float


@dataclass
class History:
    """All steps and evaluations of a run, those before a resume included."""

    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Number of the last finished step; 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    @property
    def seconds(self) -> float:
        """Time spent in steps, without evaluations and checkpoints."""
        return sum(step.seconds for step in self.steps)

    @property
    def speed(self) -> float:
        """Median tokens per second over all ranks; 0 before the first step."""
        return median(step.speed for step in self.steps) if self.steps else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain data, for checkpoints and reports."""
        return asdict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.steps[:] = [Step(**step) for step in state_dict["steps"]]
        self.evaluations[:] = [Evaluation(**found) for found in state_dict["evaluations"]]
