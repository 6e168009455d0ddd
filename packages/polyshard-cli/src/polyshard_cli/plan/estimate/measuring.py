"""Figures of this machine, for ``--machine FILE``: what ranks reach that all work at once.

Ranks of one host share its memory and, on a CPU, its cores. So as many processes as will train
measure at the same time, each what it does in a step: products, copies, small operations, messages
to its neighbour, and products beside such messages.

What only trying it can tell are times of the engine, of an optimizer and of codecs. A model of many
small layers is trained with and without the engine. The difference, for each transfer, is what one
costs beside its bytes: to start it, to wait for it, and the link's latency. Larger layers are
trained with and without codes; what these take more than they spare is theirs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from polyshard import describe, fully_shard
from polyshard_cli.plan.dry_run.probing import Account, Recorder
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.machines import Link, Machine, Roof
from polyshard_cli.plan.estimate.timing import coded_bytes
from polyshard_cli.plan.request.settings import Backend

TURNS = 7
PINGS = 50
"""Turns of what is too short for a few to tell."""
UNITS, NARROW = 16, 8
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
    given = torch.ones(4, NARROW, device=device)
    plain, sharded = _layers(device, UNITS, NARROW), _sharded(_layers(device, UNITS, NARROW))
    alone, engine = (seconds_of_turns(_step(m, given), device) for m in (plain, sharded))
    return max(engine - alone, 0.0) / (3 * UNITS)  # each is gathered twice and reduced once


def divided_seconds(device: torch.device) -> float:
    """Of an operation on ``DTensor``s, forward and backward, beside those on their parts."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plain = torch.ones(NARROW, NARROW, device=device, requires_grad=True)
    divided = distribute_tensor(plain.detach(), mesh, [Replicate()]).requires_grad_()
    account = booked(partial(_chain, divided))
    alone, whole = (
        seconds_of_turns(partial(_chain, tensor), device, PINGS) for tensor in (plain, divided)
    )
    return max(whole - alone, 0.0) / account.divided


def booked(work: Callable[[], object]) -> Account:
    """What a plan counts of ``work``."""
    account, recorder = Account(), Recorder()
    with recorder, recorder.on(account):
        work()
    return account


def _chain(tensor: Tensor) -> None:
    found = tensor
    for _ in range(UNITS):
        found = found @ tensor
    tensor.grad = None
    found.backward(torch.ones_like(found))


def codec_rate(device: torch.device, send_rate: float) -> float:
    """Bytes a second of what codecs read and write, by 8-bit codes of weights and gradients.

    Codes spare bytes of a link with ``send_rate``. 0 where polyshard-quantized is not installed.
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


WIDTH = 1024
"""Of the matrices that are multiplied, by so many rows:"""
ROWS = (1, 4, 16, 64, 256, 1024)
COPIED = 64 << 20
"""Bytes that are copied, more than a cache holds; as many are in the matrices of a turn."""
SENT = 8 << 20
BESIDE = 32 << 20
"""Bytes of messages beside products, in so many turns:"""
OVERLAPS = 15
ROUNDS = 5
"""Of everything: a machine that others use, too, is not the same one seconds later."""
START_SECONDS = 120
"""For the ranks to import torch and meet, and for each of their collectives."""


Points = tuple[tuple[float, float], ...]
"""Operations a byte, and operations a second."""


@dataclass(frozen=True)
class Figures:
    """What one rank found in one round."""

    products: dict[str, Points]
    """Of matrices, by dtype."""
    rates: dict[str, float]
    """Fields of :class:`Machine` (those of its links, too) by name."""


def measure(ranks: int, rounds: int = ROUNDS) -> Machine:
    """This machine as one of ``ranks`` processes on it sees it, all of them at work.

    Figures are medians over ranks and ``rounds``, of some five seconds each. Other hosts are
    unknown: the link inside stands for both.
    """
    device = _device(0)
    backend: Backend = "nccl" if torch.cuda.device_count() >= ranks else "gloo"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type != "cpu":
        memory_bytes = int(torch.accelerator.get_memory_info(device)[1])
    found = _measured(ranks, backend, rounds)
    products = {}
    for dtype in found[0].products:
        turns = zip(*(figures.products[dtype] for figures in found), strict=True)
        points = ((turn[0][0], statistics.median(rate for _, rate in turn)) for turn in turns)
        products[dtype] = Roof(tuple(points))
    rates: dict[str, Any] = {
        name: statistics.median(figures.rates[name] for figures in found) for name in found[0].rates
    }
    link = Link(rates.pop("bytes_per_second"), rates.pop("latency_seconds"))
    return Machine(
        name=f"this machine ({os.uname().nodename})",
        backend=backend,
        ranks_per_host=ranks,
        memory_bytes=memory_bytes,
        flops_per_second={d: max(rate for _, rate in roof.points) for d, roof in products.items()},
        efficiency=1.0,
        products=products,
        is_ahead=device.type != "cpu",
        inside=link,
        between=link,
        sources=(
            f"measured by {ranks} processes at once, torch {torch.__version__}, {device.type}",
        ),
        **rates,
    )


def _device(rank: int) -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, rank % torch.accelerator.device_count())


def _measured(ranks: int, backend: Backend, rounds: int) -> list[Figures]:
    """Of every rank and round."""
    context = mp.get_context("spawn")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, context) as pool:
        store = Path(folder, "store").as_uri()
        found = [pool.submit(_rank, r, ranks, store, backend, rounds) for r in range(ranks)]
        try:
            return [figures for rank in found for figures in rank.result()]
        except (BrokenProcessPool, RuntimeError) as error:
            raise PlanError(
                "--measure: the processes that measure could not exchange messages; 'polyshard "
                "doctor' looks for the reason"
            ) from error


def _rank(rank: int, ranks: int, store: str, backend: Backend, rounds: int) -> list[Figures]:
    """One of several that measure the same at the same time."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    device = _device(rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    timeout = timedelta(seconds=START_SECONDS)
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=ranks, timeout=timeout
    )
    sent_on = device if backend == "nccl" else torch.device("cpu")
    found = [_figures(device, sent_on) for _ in range(rounds)]
    dist.barrier()
    dist.destroy_process_group()
    return found


def _figures(device: torch.device, sent_on: torch.device) -> Figures:
    dtypes = (torch.float32, torch.bfloat16)
    send_seconds = seconds_of_turns(_messages(SENT, sent_on), sent_on)
    latency = seconds_of_turns(_messages(4, sent_on), sent_on, PINGS)
    send_rate = SENT / max(send_seconds - latency, 1e-9)
    on_host = torch.ones(COPIED // 4, pin_memory=device.type != "cpu", device="cpu")
    products = {str(d).removeprefix("torch."): _products(device, d) for d in dtypes}
    rates = {
        "bytes_per_second": send_rate,
        "latency_seconds": latency,
        "memory_bytes_per_second": 2 * _copy_rate(torch.ones(COPIED // 4, device=device), device),
        "host_bytes_per_second": _copy_rate(on_host, device),
        "operation_seconds": _operation_seconds(device),
        "divided_seconds": divided_seconds(device),
        "overlap": _overlap(device, sent_on),
        "optimizer_bytes_per_second": optimizer_rate(device),
        "codec_bytes_per_second": codec_rate(device, send_rate),
        "transfer_seconds": transfer_seconds(device),
        "collective_seconds": collective_seconds(sent_on),
    }
    return Figures(products, rates)


def _products(device: torch.device, dtype: torch.dtype) -> Points:
    """Of matrices that are not in a cache."""
    width = WIDTH if device.type == "cpu" else 8 * WIDTH
    count = max(1, COPIED // (width * width * dtype.itemsize))
    matrices = [torch.ones(width, width, dtype=dtype, device=device) for _ in range(count)]
    points = []
    for rows in ROWS:
        left = torch.ones(rows, width, dtype=dtype, device=device)
        used = matrices if rows < WIDTH else matrices[:1]
        flops = 2 * rows * width * width
        touched = (2 * rows * width + width * width) * dtype.itemsize

        def multiply(left: Tensor = left, matrices: list[Tensor] = used) -> None:
            for matrix in matrices:
                left @ matrix

        seconds = seconds_of_turns(multiply, device, 3)
        points.append((flops / touched, flops * len(used) / seconds))
    return tuple(points)


def _copy_rate(source: Tensor, device: torch.device) -> float:
    target = torch.empty_like(source, device=device)
    return COPIED / seconds_of_turns(lambda: target.copy_(source), device)


def _operation_seconds(device: torch.device) -> float:
    """Of small operations, forward and backward, counted as a plan counts them."""
    layers = [layer for _ in range(20) for layer in (nn.Linear(8, 8), nn.GELU())]
    model, given = nn.Sequential(*layers).to(device), torch.ones(8, 8, device=device)

    def turn(times: int) -> None:
        for _ in range(times):
            model(given).sum().backward()

    operations = 10 * booked(partial(turn, 1)).kernels.total()
    return seconds_of_turns(partial(turn, 10), device) / operations


def _messages(
    nbytes: int, device: torch.device, beside: Callable[[], object] = int
) -> Callable[[], None]:
    """What exchanges messages with neighbours, and does something ``beside``."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(nbytes // 4, device=device)
    into = torch.empty_like(out)

    def turn() -> None:
        operations = [
            dist.P2POp(dist.isend, out, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, into, (rank - 1) % ranks),
        ]
        works = dist.batch_isend_irecv(operations)
        beside()
        for work in works:
            work.wait()

    return turn


def _overlap(device: torch.device, sent_on: torch.device) -> float:
    """Part of the shorter of products and messages that is free when both are under way."""
    matrix = torch.ones(WIDTH, WIDTH, device=device)
    left = torch.ones(64, WIDTH, device=device)

    def products(count: int) -> list[Tensor]:
        return [left @ matrix for _ in range(count)]

    sending = seconds_of_turns(_messages(BESIDE, sent_on), sent_on)
    once = seconds_of_turns(partial(products, 16), device) / 16
    compute = partial(products, max(1, round(sending / once)))
    computing = seconds_of_turns(compute, device, OVERLAPS)
    both = seconds_of_turns(_messages(BESIDE, sent_on, compute), device, OVERLAPS)
    return min(1.0, max(0.0, (computing + sending - both) / min(computing, sending)))
