"""What a user of every plugin might write: checked with `mypy --strict` against installed wheels.

Nothing here runs in the check; as a script it trains one rank for a step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from polyshard import Observer, Plugin, describe, fully_shard, hookimpl, stats
from polyshard_calibration import Calibration
from polyshard_matrix import MatrixOptimizer, hidden_matrices
from polyshard_offload import Offload
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


def main() -> None:
    """Train a step on one rank, watched."""
    counting = Counting()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder, "store").as_uri()
        dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        try:
            sharded: nn.Sequential = fully_shard(model, plugins=[counting])
            optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
            sharded(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            print(describe(sharded), stats(sharded).bytes_sent, counting.reductions)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
