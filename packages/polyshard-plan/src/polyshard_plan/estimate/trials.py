"""What only trying it can tell: the engine's own time for a transfer, and an optimizer's for bytes.

A model of many small layers is trained with and without the engine. The difference, for each
transfer, is what one costs beside its bytes: to start it, to wait for it, and the link's latency.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyshard import fully_shard
from polyshard_plan.estimate.turns import PINGS, seconds_of_turns

__all__ = ["collective_seconds", "optimizer_rate", "transfer_seconds"]

UNITS, WIDTH = 16, 8
STEPPED = 8 << 20
"""Elements that an optimizer steps."""
TOUCHED = 7
"""Values that a step of AdamW reads or writes for each element."""


def transfer_seconds(device: torch.device) -> float:
    """Of one gather or reduction of the engine's whose bytes are nothing."""
    given = torch.ones(4, WIDTH, device=device)
    plain, sharded = _layers(device), _layers(device)
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    alone, engine = (seconds_of_turns(_step(m, given), device) for m in (plain, sharded))
    # Each is gathered twice and reduced once, but for the last, which backward finds gathered.
    return max(engine - alone, 0.0) / (3 * UNITS - 1)


def _layers(device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))).to(device)


def _step(model: nn.Module, given: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(given).sum().backward()
        model.zero_grad()

    return step


def optimizer_rate(device: torch.device) -> float:
    """Bytes a second that a fused AdamW reads and writes, those of its state included."""
    parameter = nn.Parameter(torch.zeros(STEPPED, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return TOUCHED * parameter.nbytes / seconds_of_turns(optimizer.step, device)


def collective_seconds(device: torch.device) -> float:
    """Of a sum over all ranks, as a model's own operations ask for it, of next to nothing."""
    values = torch.zeros(1, device=device)
    return seconds_of_turns(lambda: dist.all_reduce(values), device, PINGS)
