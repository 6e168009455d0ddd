"""A resize in the living processes, beside a checkpoint, a restart and a load.

    python -m benchmarks.resize

Ranks train a step, save a checkpoint, and then resize to fewer ranks. Then fresh processes, as many
as are left, start, build the model and load the checkpoint: that time begins with their start.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass

import torch.distributed as dist

import polyshard_resilience
from benchmarks import harness
from benchmarks.harness import Found
from polyshard_checkpoint import Checkpoints, TrainingState


@dataclass(frozen=True)
class Case(harness.Case, width=64, layers=2):
    """What is measured."""

    ranks: int = 4
    left: int = 3
    width: int = 1024
    layers: int = 8

    def measure(self) -> Found:
        """Seconds of the slowest rank, bytes of all, and what share of a restart a resize takes."""
        with tempfile.TemporaryDirectory(prefix="polyshard-bench-") as folder:
            found = harness.run_ranks(self.ranks, _living, self, folder)
            begin = time.time()
            ended, load_seconds = harness.run_ranks(self.left, _restarted, self, folder)
        restart = found["save_seconds"] + ended - begin
        share = found["resize_seconds"] / restart
        return {**found, "load_seconds": load_seconds, "restart_seconds": restart, "share": share}


def _living(case: Case, folder: str) -> Found:
    polyshard_resilience.enable()
    training = harness.linear_training(case.width, case.layers, rows=2)
    training.step()
    model, optimizer = training.model, training.optimizer
    group = dist.new_group(list(range(case.left)))
    begin = time.perf_counter()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, TrainingState(model, [optimizer], random=False))
    save = time.perf_counter() - begin
    dist.barrier()
    begin = time.perf_counter()
    is_left = dist.get_rank() < case.left
    resized = polyshard_resilience.resize(model, optimizer, group if is_left else None)
    save, resize = harness.slowest(save, time.perf_counter() - begin)
    sent: list[int] = [0] * case.ranks
    dist.all_gather_object(sent, resized.sent_bytes)
    return {"save_seconds": save, "resize_seconds": resize, "moved_bytes": sum(sent)}


def _restarted(case: Case, folder: str) -> tuple[float, float]:
    training = harness.linear_training(case.width, case.layers, rows=2)
    begin = time.perf_counter()
    with Checkpoints(folder) as checkpoints:
        checkpoints.load(TrainingState(training.model, [training.optimizer], random=False))
    (load,) = harness.slowest(time.perf_counter() - begin)
    return time.time(), load


if __name__ == "__main__":
    harness.command(Case(), __doc__)
