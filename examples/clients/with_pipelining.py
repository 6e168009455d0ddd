"""``torch.distributed.pipelining``: two stages a rank, sharded, in an interleaved 1F1B schedule.

On four ranks (``torchrun --nproc-per-node 4``) each stage is sharded over two of them.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

STAGES = 4
PIPELINE = 2  # ranks


class Block(nn.Module):
    """A stage: one residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(common.WIDTH, 2 * common.WIDTH)
        self.down = nn.Linear(2 * common.WIDTH, common.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape out as in."""
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


def loop(arguments: argparse.Namespace) -> list[float]:
    """Every stage is a root of its own; micro-batches add up and are reduced once a step."""
    fully_shard = common.engine(arguments.engine)
    dist.init_process_group("gloo")
    shape = (PIPELINE, dist.get_world_size() // PIPELINE)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "data"))
    first, replica = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    parts = [Block() for _ in range(STAGES)]
    mine = {index: parts[index] for index in (first, first + PIPELINE)}
    for part in mine.values():
        # Freed after forward, each micro-batch would gather them again.
        fully_shard(part, mesh=mesh["data"], reshard_after_forward=False)
    group, device = mesh["pipeline"].get_group(), torch.device("cpu")
    stages: list[Any] = [PipelineStage(p, i, STAGES, device, group=group) for i, p in mine.items()]
    schedule = ScheduleInterleaved1F1B(stages, common.ROWS, loss_fn=F.mse_loss)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in mine.values()]
    losses: list[float] = []
    for step in range(common.STEPS):
        x = F.one_hot(common.batch(step, replica), common.WIDTH * 2).float()[..., : common.WIDTH]
        of_micro_batches: list[Tensor] = []
        if STAGES - 1 in mine:
            schedule.step(target=x.roll(1, dims=1), losses=of_micro_batches)
        else:
            schedule.step(x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses += [loss.item() for loss in of_micro_batches]
    return losses


if __name__ == "__main__":
    common.main(loop, common.parser(__doc__))
