"""Jobs to compare, and mistakes in them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from polyshard_cli.compare import Job

WIDTH = 64


def squares(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def rows(step: int, rank: int, ranks: int) -> Tensor:
    """Drawn from the global generator."""
    del step, rank, ranks
    return torch.randn(4, WIDTH)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def linear() -> Job:
    """One matrix of 64 x 64 float32: 16 KiB."""
    return Job(nn.Linear(WIDTH, WIDTH, bias=False), rows, squares, sgd)


class Tower(nn.Module):
    """Units in a module list, of sizes that two ranks do not divide; one is frozen; dropout."""

    def __init__(self, inner: int = 33) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, inner)
        self.layers = nn.ModuleList(nn.Linear(inner, inner) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.25)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + self.dropout(layer(x).relu())
        return x * self.scale


def tower() -> tuple[Any, ...]:
    return Tower(), rows, squares


def wide() -> tuple[Any, ...]:
    """Matrices that are large enough to be quantized."""
    return Tower(257), rows, squares


def on_meta() -> tuple[Any, ...]:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)), rows, squares


def on_meta_without_values() -> tuple[Any, ...]:
    with torch.device("meta"):
        return Tower(), rows, squares


def engine_of(model: nn.Module) -> str:
    names = {kind.__module__.split(".")[0] + kind.__name__ for kind in type(model).__mro__}
    if "torchDistributedDataParallel" in names:
        return "ddp"
    if "torchFullyShardedDataParallel" in names:
        return "fsdp1"
    if "polyshardFSDPModule" in names:
        return "polyshard"
    return "fsdp2" if "torchFSDPModule" in names else "single"


def troubled(model: nn.Module, x: Tensor) -> Tensor:
    """Rank 1 of FSDP1 raises, that of FSDP2 is killed, DDP's second step leaves the program."""
    engine = engine_of(model)
    is_last = dist.is_initialized() and dist.get_rank() == 1
    if engine == "fsdp1" and is_last:
        raise ArithmeticError("of its own\nin two lines")
    if engine == "fsdp2" and is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    if engine == "ddp" and is_last and float(model.module.seen.add_(1)) > 1:  # type: ignore[union-attr, operator]
        print("so long", flush=True)
        os._exit(7)
    return squares(model, x)


class Counting(nn.Linear):
    """Knows how often its loss was asked for."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen = torch.zeros(())


def trouble() -> tuple[Any, ...]:
    return Counting(), rows, troubled


def without_more(model: nn.Module, x: Tensor) -> Tensor:
    """As a reader raises whose file has ended."""
    raise EOFError("no more lines")


def ended() -> tuple[Any, ...]:
    return Counting(), rows, without_more


def stuck(model: nn.Module, x: Tensor) -> Tensor:
    if engine_of(model) == "single":
        time.sleep(600)
    return squares(model, x)


def hangs() -> tuple[Any, ...]:
    return nn.Linear(WIDTH, WIDTH), rows, stuck


def raising() -> None:
    raise RuntimeError("the script's own trouble")


def nothing() -> None:
    pass


def pair() -> tuple[Any, ...]:
    return nn.Linear(2, 2), rows


def no_module() -> tuple[Any, ...]:
    return "a model", rows, squares


def no_parameters() -> tuple[Any, ...]:
    return nn.ReLU(), rows, squares


def no_function() -> tuple[Any, ...]:
    return nn.Linear(2, 2), [torch.ones(2)], squares


def bad_batch() -> tuple[Any, ...]:
    def batch(step: int, rank: int, ranks: int) -> Tensor:
        raise IndexError(f"no batch {step} for {rank} of {ranks}")

    return nn.Linear(2, 2), batch, squares


def bad_loss() -> tuple[Any, ...]:
    return nn.Linear(WIDTH, 3), rows, lambda model, x: model(x)


def bad_optimizer() -> Job:
    return Job(nn.Linear(2, 2), rows, squares, lambda model: model)  # type: ignore[arg-type, return-value]


def bad_units() -> Job:
    return Job(Tower(), rows, squares, units=("layrs.*",))


def unseeded() -> tuple[Any, ...]:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(int.from_bytes(os.urandom(2), "little"))
    return model, rows, squares
