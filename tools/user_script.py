"""What a user of every plugin might write: checked with `mypy --strict` against installed wheels.

Nothing here runs.
"""

from __future__ import annotations

import torch
from torch import nn

from polyshard import Observer, Plugin, describe, fully_shard, hookimpl, stats
from polyshard_calibration import Calibration
from polyshard_offload import Offload
from polyshard_optimizers import MatrixOptimizer, hidden_matrices
from polyshard_quantized import Int8Block, QuantizedComm
from polyshard_reproducible import Reproducible
from polyshard_tensor_parallel import TensorParallel


class Counting(Plugin, Observer):
    """A plugin of the user's own."""

    name = "counting"

    def __init__(self) -> None:
        self.reductions = 0

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        """Count it."""
        self.reductions += 1

    @hookimpl
    def polyshard_observer(self) -> Observer:
        """Watch every group."""
        return self


def stacks() -> list[list[object | str]]:
    """Every plugin as users pass it, by name or as an object."""
    return [
        ["offload", QuantizedComm(weights=Int8Block(), gradients=Int8Block())],
        [Offload(optimizer="host"), Calibration.load("calibration.json")],
        [TensorParallel(), Counting()],
        [MatrixOptimizer(torch.optim.Muon, matrices=hidden_matrices)],
        [Reproducible(slots=4)],
    ]


def train() -> None:
    """Shard a model, watched, and step it."""
    counting = Counting()
    model: nn.Sequential = fully_shard(nn.Sequential(nn.Linear(16, 32)), plugins=[counting])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    print(describe(model), stats(model).bytes_sent, counting.reductions)
