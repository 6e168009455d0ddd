"""What every measurement needs: fresh processes, turns, a command, and tables of Markdown.

Engines take turns on the same ranks and data (:func:`polyshard_cli.compare.turns.in_turns`), so
that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.result import save
from polyshard_cli.compare.turns import in_turns, median_of, paired
from polyshard_demo.model import LanguageModel, ModelSettings
from polyshard_testing.world import World

__all__ = ["in_turns", "median_of", "paired"]

COLLECTIVE_SECONDS = 120.0
"""A rank may wait that long for its peers; ranks may compute for as long as they like."""
CPU = torch.device("cpu")
Work = Callable[[], object]
Found = dict[str, Any]


def run_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """Call ``work(*args)`` on ``ranks`` fresh processes; return what rank 0's call returned."""
    with closing(World(ranks, COLLECTIVE_SECONDS, "spawn")) as world:
        return world.run(_on_rank, work, args, timeout=None)[0]


def _on_rank(rank: int, _: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    answer = work(*args)
    return None if rank else answer


def run_alone(work: Callable[..., Any], *args: Any) -> Any:
    """Call ``work(*args)`` in a fresh process without a process group; return what it returned."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (1,)) as pool:
        return pool.submit(work, *args).result()


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


def slowest(work: Work) -> Callable[[int], float]:
    """A way to take a turn: all ranks begin together, and the slowest one's seconds count."""

    def turn(_: int) -> float:
        dist.barrier()
        spent = torch.tensor(seconds(work))
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent)

    return turn


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


def sharded(model: Any, units: Iterable[nn.Module], fully_shard: Any, **keywords: Any) -> Any:
    """``model`` with its ``units`` sharded one by one, and the rest as one more."""
    for unit in units:
        fully_shard(unit, **keywords)
    return fully_shard(model, **keywords)


def shards(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """This rank's part of the weights, and of what the optimizer keeps of each."""
    values: list[Any] = [p.detach() for p in model.parameters()]
    if optimizer is not None:
        values += [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    return [v.to_local() if isinstance(v, DTensor) else v for v in values]


def command(measure: Callable[[Any], Found], case: Any, words: str | None) -> None:
    """``python -m`` of a measurement: an option for each number or word of ``case``, ``--json``."""
    parser = argparse.ArgumentParser(description=(words or "").splitlines()[0])
    for field in fields(case):
        default = getattr(case, field.name)
        if isinstance(default, bool):
            parser.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction)
            parser.set_defaults(**{field.name: default})
        elif isinstance(default, int | float | str):
            parser.add_argument(f"--{field.name}", type=type(default), default=default)
    parser.add_argument("--quick", action="store_true", help="small and short, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = vars(parser.parse_args())
    quick, path = options.pop("quick"), options.pop("json")
    chosen = type(case)(**options)
    torch.set_num_threads(1)
    found = measure(chosen.quick() if quick else chosen)
    show(found)
    if path:
        save(found, path)


def show(found: Mapping[str, Any], indent: str = "") -> None:
    """Print figures by name; long lists of samples are left out."""
    for name, given in found.items():
        value = given
        if isinstance(given, list) and given and isinstance(given[0], dict):
            value = {str(number): each for number, each in enumerate(given)}
        if isinstance(value, Mapping):
            print(f"{indent}{name}:")
            show(value, f"{indent}  ")
        elif not isinstance(value, list):
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            print(f"{indent}{name}: {text}", flush=True)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a table of Markdown."""
    cells = list(head)
    yield f"| {' | '.join(cells)} |"
    yield "|" + "---|" * len(cells)
    for row in rows:
        yield f"| {' | '.join(row)} |"
