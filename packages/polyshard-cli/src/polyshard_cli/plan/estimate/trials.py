"""What only trying it can tell: time of the engine, of an optimizer, of codecs.

A model of many small layers is trained with and without the engine. The difference, for each
transfer, is what one costs beside its bytes: to start it, to wait for it, and the link's latency.
Larger layers are trained with and without codes; what these take more than they spare is theirs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from polyshard import describe, fully_shard
from polyshard_cli.plan.dry_run.recorder import Account, Recorder
from polyshard_cli.plan.estimate.overheads import coded_bytes

TURNS = 7
PINGS = 50
"""Turns of what is too short for a few to tell."""
UNITS, WIDTH = 16, 8
CODED_UNITS, CODED_WIDTH = 6, 1536
"""More than a cache holds."""
STEPPED = 8 << 20
"""Elements that an optimizer steps."""
TOUCHED = 7
"""Values that a step of AdamW reads or writes for each element."""


def seconds_of_turns(work: Callable[[], object], device: torch.device, turns: int = TURNS) -> float:
    """Of one turn of ``work``, in the middle of several, until the slowest rank is done.

    Ranks wait for each other in a step, so what counts where they share cores is when all are done;
    what meeting costs is taken off.
    """
    meeting = _median(lambda: None, device, PINGS)
    return max(_median(work, device, turns) - meeting, 1e-9)


def _median(work: Callable[[], object], device: torch.device, turns: int) -> float:
    found = []
    for _ in range(turns + 1):
        dist.barrier()
        begin = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        dist.barrier()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def transfer_seconds(device: torch.device) -> float:
    """Of one gather or reduction of the engine's whose bytes are nothing."""
    given = torch.ones(4, WIDTH, device=device)
    plain, sharded = _layers(device, UNITS, WIDTH), _sharded(_layers(device, UNITS, WIDTH))
    alone, engine = (seconds_of_turns(_step(m, given), device) for m in (plain, sharded))
    return max(engine - alone, 0.0) / (3 * UNITS)  # each is gathered twice and reduced once


def divided_seconds(device: torch.device, ranks: int) -> float:
    """Of an operation on ``DTensor``s, forward and backward, beside those on their parts."""
    mesh = init_device_mesh(device.type, (ranks,))
    plain = torch.ones(WIDTH, WIDTH, device=device, requires_grad=True)
    divided = distribute_tensor(plain.detach(), mesh, [Replicate()]).requires_grad_()
    account, recorder = Account(), Recorder()
    with recorder, recorder.on(account):
        _chain(divided)
    alone, whole = (
        seconds_of_turns(partial(_chain, tensor), device, PINGS) for tensor in (plain, divided)
    )
    return max(whole - alone, 0.0) / account.divided


def _chain(tensor: Tensor) -> None:
    found = tensor
    for _ in range(UNITS):
        found = found @ tensor
    tensor.grad = None
    found.backward(torch.ones_like(found))


def codec_rate(device: torch.device, send_rate: float) -> float:
    """Bytes a second of what codecs read and write, by 8-bit codes of weights and gradients.

    Args:
        device: to train on.
        send_rate: bytes a second of the link, which codes spare.

    Returns:
        0 where polyshard-quantized is not installed.
    """
    if find_spec("polyshard_quantized") is None:
        return 0.0
    quantized = import_module("polyshard_quantized")
    coder = quantized.QuantizedComm(gradients=quantized.Int8Block())
    given = torch.ones(4, CODED_WIDTH, device=device)
    models = [
        _sharded(_layers(device, CODED_UNITS, CODED_WIDTH), plugins) for plugins in ([], [coder])
    ]
    native, coded = (seconds_of_turns(_step(model, given), device) for model in models)
    plain, other = (describe(model).groups for model in models)
    spared = sum(p.gather_bytes + p.regather_bytes + p.reduce_bytes for p in plain)
    spared -= sum(p.gather_bytes + p.regather_bytes + p.reduce_bytes for p in other)
    seconds = coded - native + spared / send_rate
    return sum(map(coded_bytes, other)) / seconds if seconds > 0 else 0.0


def _layers(device: torch.device, count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).to(device)


def _sharded(model: nn.Sequential, plugins: Sequence[Any] = ()) -> nn.Sequential:
    for layer in (*model, model):
        fully_shard(layer, plugins=list(plugins))
    return model


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
    """Of a sum over pairs of ranks, of next to nothing, between products that others make, too.

    An odd number of ranks adds up among all; what that takes is divided by the others of each.
    """
    ranks = dist.get_world_size()
    together = 2 if ranks % 2 == 0 else ranks
    group, _ = dist.new_subgroups(together)
    values = torch.zeros(1, device=device)
    rows, matrix = (torch.ones(size, CODED_WIDTH, device=device) for size in (16, CODED_WIDTH))

    def turn(*, sums: bool) -> None:
        for _ in range(UNITS):
            rows @ matrix
            if sums:
                dist.all_reduce(values, group=group)

    alone, both = (seconds_of_turns(partial(turn, sums=sums), device) for sums in (False, True))
    return max(both - alone, 0.0) / UNITS / max(together - 1, 1)
