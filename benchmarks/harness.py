"""What every measurement needs: a case, fresh processes, turns, a command, a table of Markdown.

A measurement is a function from a case to figures. Engines take turns on the same ranks and data
(:func:`polyshard_cli.compare.turns.in_turns`), so that whatever else the machine does hits all of
them alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.pretty import pprint
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

import polyshard
from benchmarks.result import save
from polyshard import failures
from polyshard_cli.compare.turns import in_turns, median_of, paired
from polyshard_demo.model import LanguageModel, ModelSettings
from polyshard_testing.world import World

__all__ = ["in_turns", "median_of", "paired"]

COLLECTIVE_SECONDS = 120.0
"""A rank may wait that long for its peers; ranks may compute for as long as they like."""
MIB = 1 << 20
LIBRARIES: dict[str, Any] = {"polyshard": polyshard, "torch": fsdp}
"""Both have a ``fully_shard`` and what goes with it."""
CPU = torch.device("cpu")
T = TypeVar("T")
Work = Callable[[], object]
Found = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is measured. A command has an option for each field.

    Keywords of a subclass (``class Mine(Case, width=64)``) are what a quick run changes.
    """

    _small: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls, **small: Any) -> None:
        """Keep what a quick run changes."""
        super().__init_subclass__()
        cls._small = small

    def quick(self) -> Self:
        """The same code in seconds; figures of it mean nothing."""
        return replace(self, **self._small)

    def measure(self) -> Found:
        """The figures."""
        raise NotImplementedError


@dataclass(frozen=True)
class OnRanks(Case):
    """What is measured on so many fresh processes; the figures are rank 0's."""

    ranks: int = 2

    def measure(self) -> Found:
        return run_ranks(self.ranks, self.on_rank)

    def on_rank(self) -> Found:
        """What each of them does."""
        raise NotImplementedError


# Processes ----------------------------------------------------------------------------------------


def run_ranks(ranks: int, work: Callable[..., T], *args: Any, device: str = "cpu") -> T:
    """Call ``work(*args)`` on ``ranks`` fresh processes; return what rank 0's call returned."""
    return every_rank(ranks, work, *args, device=device)[0]


def every_rank(ranks: int, work: Callable[..., T], *args: Any, device: str = "cpu") -> list[T]:
    """The same, and return what the call of each rank returned."""
    with closing(World(ranks, COLLECTIVE_SECONDS, "spawn", device)) as world:
        return world.run(_on_rank, work, args, timeout=None)


def _on_rank(rank: int, size: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    del rank, size
    if torch.get_default_device().type != "cpu":
        # Ranks of tests report failures, for which the host waits for a device in each step.
        failures.handle_failures(failures.FailureHandler)
    return work(*args)


def run_alone(work: Callable[..., T], *args: Any) -> T:
    """Call ``work(*args)`` in a fresh process without a process group; return what it returned."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (1,)) as pool:
        return pool.submit(work, *args).result()


# Time ---------------------------------------------------------------------------------------------


def seconds(work: Work, device: torch.device = CPU) -> float:
    """Of one call until the device is done with it; what was launched before is waited for."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def slowest(*spent: float) -> list[float]:
    """The largest of all ranks, of each."""
    most = torch.tensor(spent)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return [float(each) for each in most]


def time_steps(steps: Mapping[str, Work], turns: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of steps in turns: all ranks begin together, and the slowest one's count."""

    def turn(step: Work) -> float:
        dist.barrier()
        return slowest(seconds(step))[0]

    ways = {name: lambda _, step=step: turn(step) for name, step in steps.items()}
    return in_turns(ways, turns, warmup)


# Models -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A sharded model, its optimizer, and the loss of a batch, or of its own one."""

    model: Any
    optimizer: Any
    loss: Callable[..., Tensor]

    def step(self, *batch: Tensor) -> None:
        self.loss(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def shards(self) -> list[Tensor]:
        """This rank's part of the weights, and of what the optimizer keeps of each."""
        kept = [v for state in self.optimizer.state.values() for v in state.values() if v.ndim]
        return local([*self.model.parameters(), *kept])


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts."""
    return [t.to_local().detach() if isinstance(t, DTensor) else t.detach() for t in tensors]


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class Layer(nn.Module):
    """Uses so many parameters of one shape, all trained."""

    def __init__(self, parameters: int, *shape: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + weight.square().sum()
        return x


def language_model(width: int, layers: int, tokens: int, hidden: int) -> LanguageModel:
    """The demonstration's, with heads of 64; the same values on every rank, for every engine."""
    torch.manual_seed(0)
    heads = max(width // 64, 1)
    return LanguageModel(
        ModelSettings(width=width, layers=layers, heads=heads, hidden=hidden, sequence=tokens)
    )


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Next-byte cross entropy of ``batch`` (``[1, tokens + 1]``)."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def language_training(
    case: Any, hidden: int, layers: int = 8, setting: str = "", **keywords: Any
) -> Training:
    """A language model of the case's width and tokens under polyshard, with AdamW.

    ``setting`` is one of AdamW's: ``foreach`` or ``fused``. ``keywords`` are ``fully_shard``'s.
    """
    model = language_model(case.width, layers, case.tokens, hidden)
    sharded(model, model.blocks, polyshard.fully_shard, **keywords)
    batch = torch.randint(0, 256, (1, case.tokens + 1))
    chosen: dict[str, Any] = {setting: True} if setting else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **chosen)
    return Training(model, optimizer, lambda: loss_of(model, batch))


def linear_training(
    width: int, layers: int, rows: int, lr: float = 1e-3, **keywords: Any
) -> Training:
    """Square layers under polyshard, each a unit, with AdamW; ``rows`` is the batch's."""
    model = linear_model(width, layers, **keywords)
    batch = torch.randn(rows, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return Training(model, optimizer, lambda: model(batch).square().mean())


def linear_model(width: int, layers: int, bias: bool = True, **keywords: Any) -> Any:
    torch.manual_seed(0)
    stack = [nn.Linear(width, width, bias=bias) for _ in range(layers)]
    return sharded(nn.Sequential(*stack), stack, polyshard.fully_shard, **keywords)


def sharded(model: Any, units: Iterable[nn.Module], fully_shard: Any, **keywords: Any) -> Any:
    """``model`` with its ``units`` sharded one by one, and the rest as one more."""
    for unit in units:
        fully_shard(unit, **keywords)
    return fully_shard(model, **keywords)


def bf16(library: Any) -> dict[str, Any]:
    """Compute in bfloat16, reduce in float32."""
    return {"mp_policy": library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


# Command and tables -------------------------------------------------------------------------------


def command(name: str) -> None:
    """``python -m benchmarks NAME``: an option for each field of the module's case, ``--json``."""
    module: Any = import_module(f"benchmarks.{name}")
    case, words = module.Case(), module.__doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=words)
    for field in fields(case):
        default = getattr(case, field.name)
        how: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        elif isinstance(default, tuple):
            how = {"nargs": "+", "type": int if "int" in str(field.type) else str}
        parser.add_argument(f"--{field.name}", default=default, **how)
    parser.add_argument("--quick", action="store_true", help="small and short, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = vars(parser.parse_args())
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    quick, path = given.pop("quick"), given.pop("json")
    chosen = replace(case, **given)
    torch.set_num_threads(1)
    found = (chosen.quick() if quick else chosen).measure()
    show(found)
    if path:
        save(found, path)


def show(found: Found) -> None:
    """Print figures by name, and the first of long lists of samples."""
    pprint(found, max_length=20, expand_all=True)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a table of Markdown."""
    cells = list(head)
    yield f"| {' | '.join(cells)} |"
    yield "|" + "---|" * len(cells)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def columns(items: Iterable[T], cells: Mapping[str, Callable[[T], str]]) -> Iterator[str]:
    """A table with a row an item, from what is below each head."""
    return table(cells, ([cell(item) for cell in cells.values()] for item in items))
