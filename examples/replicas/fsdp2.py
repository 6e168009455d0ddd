"""The same training on torch's FSDP2 and torchft, as their users write it, for ``kills.py --peer``.

Slots are data order alone here: torch sums gradients in an order that goes by who is there.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchft.optim import OptimizerWrapper
from train import (
    BATCH,
    ROWS,
    SLOTS,
    WIDTH,
    Block,
    Log,
    Settings,
    digests,
    leave,
    manager_of,
    settings_of,
)

from polyshard_reproducible import SlotSampler


def sharded(seed: int) -> Any:
    """The model, with one dtype a unit, as torch's hook of the sums needs it."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1)).float()
    for block in (model[0], model[1]):
        fully_shard(block)
    fully_shard(model)
    return model


def train(settings: Settings) -> None:
    """Train until the run is over."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    log = Log(settings)
    model = sharded(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    sampler = SlotSampler(ROWS, BATCH, SLOTS, seed=1)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    with manager_of(settings) as manager:
        manager.register_state_dict_fn("fsdp2", load, state)

        def hook(total: Tensor) -> None:
            manager.allreduce(total).wait()

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(hook)
        steps: Any = OptimizerWrapper(manager, optimizer)
        log.write(event="ready")
        while not settings.is_over(manager.current_step()):
            steps.zero_grad()
            number, size = manager.current_step(), manager.num_participants()
            turns = max(SLOTS // (ranks * size), 1)
            first = (manager.participating_rank() * ranks + rank) * turns
            mean = 0.0
            for slot in range(first, first + turns):
                torch.manual_seed(number * SLOTS + slot)
                rows = data[sampler.indices(number, slot)]
                loss = (model(rows).mean(1) - rows.square().mean(1)).square().mean() / turns
                model.set_requires_gradient_sync(slot == first + turns - 1)
                loss.backward()
                mean += float(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            time.sleep(settings.pause)
            steps.step()
            committed = manager.current_step() > number
            loss_bits = mean.hex()
            log.write(event="step", number=number, committed=committed, groups=size, loss=loss_bits)
        log.finish(digests(model, optimizer))
    dist.barrier()


if __name__ == "__main__":
    train(settings_of(__doc__))
    leave()
