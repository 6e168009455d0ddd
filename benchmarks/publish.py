"""A step's weights on their way to a generator: whole tensors from rank 0, or each rank its own.

    python -m benchmarks publish --ranks 4      (root: each rank has a network namespace of its own)

Every rank, and the receiver, has a link of 1 Gbit/s each way, as hosts have. After each step of
AdamW at a learning rate of 1e-6 the weights go to a bfloat16 receiver in four ways, which take
turns: ``full_tensor()`` of one parameter after the other, sent by rank 0; a full state dict on rank
0, sent by it; all of them by their ranks; what changed by their ranks. All four go through the same
receiver, which proves every tensor. Bytes are what the ranks' links carried. What one way frees
stays resident and hides what the next one needs, so memory is measured in fresh processes for each
way, right after: how much more rank 0 held, at most, than its shards, gradients and optimizer.

Without root there are no links, and figures say so.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from benchmarks import harness
from benchmarks.harness import Found, Training
from benchmarks.links import Host, linked, run_hosts
from polyshard_cli.compare.training.memory import Meter
from polyshard_publish import Publisher, Receiver, ReceiverServer, SocketTarget
from polyshard_publish.blocks import Block
from polyshard_publish.digests import digest_of
from polyshard_publish.patches import Patch
from polyshard_publish.pieces import Entry
from polyshard_publish.wire import Update

FULL_TENSOR, STATE_DICT, WHOLE, PATCHES = "full_tensor", "rank 0", "published whole", "patches"
WAYS = (FULL_TENSOR, STATE_DICT, WHOLE, PATCHES)
KEEP: dict[str, Any] = {WHOLE: "nothing", PATCHES: "values"}
Addresses = dict[str, str]
"""Of the receiver, by way."""


@dataclass(frozen=True)
class Case(harness.Case, width=128, layers=2, turns=1):
    """What is measured."""

    ranks: int = 2
    width: int = 2048
    layers: int = 8
    turns: int = 3
    rate: str = "1gbit"

    def measure(self) -> Found:
        """Medians; seconds of the slowest rank until the receiver serves the version."""
        rate = self.rate if os.geteuid() == 0 else ""
        held = {}
        with linked(self.ranks + 1, rate) as (*hosts, last):
            with receiver(last) as addresses:
                found = run_hosts(hosts, _time, self, addresses)
            for way in WAYS:
                with receiver(last) as addresses:
                    held[way] = run_hosts(hosts, _hold, self, addresses, way)[0]
        seconds = found[0]["seconds"]
        return {
            "ranks": self.ranks,
            "link": rate or "none",
            "model_bytes": found[0]["model_bytes"],
            "seconds": seconds,
            "full_tensor_over": {way: seconds[FULL_TENSOR] / seconds[way] for way in WAYS},
            "rank_0_over": {way: seconds[STATE_DICT] / seconds[way] for way in WAYS},
            "link_bytes": {way: sum(one["bytes"][way] for one in found) for way in WAYS},
            "rank_0_bytes": held,
        }


@contextmanager
def receiver(host: Host) -> Iterator[Addresses]:
    """A fresh process with a receiver for each way."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(host, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()


def _receive(host: Host, pipe: Connection) -> None:
    host.enter()
    servers = {way: ReceiverServer(Receiver(), host.address) for way in WAYS}
    pipe.send({way: server.address for way, server in servers.items()})
    time.sleep(3600)


def _trained(case: Case) -> Training:
    """With a gradient, the same at every step."""
    training = harness.linear_training(case.width, case.layers, rows=4, lr=1e-6)
    training.loss().backward()
    return training


def _publishing(way: str, model: nn.Module, address: str) -> Callable[[int], object]:
    """What publishes a version in a way."""
    if way in KEEP:
        return Publisher(model, to=address, dtype=torch.bfloat16, keep=KEEP[way]).publish
    whole = _each_tensor if way == FULL_TENSOR else _full_state
    return lambda version: _send(address, version, whole(model), model)


def _time(host: Host, case: Case, addresses: Addresses) -> Found:
    training = _trained(case)
    ways = {way: _publishing(way, training.model, addresses[way]) for way in WAYS}
    for way in ways.values():
        way(0)
    carried: dict[str, list[float]] = {way: [] for way in WAYS}
    stepped: set[int] = set()

    def turn(way: str, number: int) -> float:
        if number not in stepped:
            stepped.add(number)
            training.optimizer.step()
        dist.barrier()
        before = host.carried()
        spent = harness.seconds(lambda: ways[way](number + 1))
        carried[way].append(host.carried() - before)
        return harness.slowest(spent)[0]

    found = harness.in_turns({way: partial(turn, way) for way in WAYS}, case.turns)
    return {
        "seconds": harness.median_of(found),
        "bytes": harness.median_of(carried),
        "model_bytes": 4 * sum(parameter.numel() for parameter in training.model.parameters()),
    }


def _hold(_: Host, case: Case, addresses: Addresses, way: str) -> int:
    """Bytes that this rank held at most, beside what it held before the first of two versions."""
    training = _trained(case)
    training.optimizer.step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    meter = Meter(harness.CPU)
    meter.begin_steps()
    publish = _publishing(way, training.model, addresses[way])
    for version in range(2):
        publish(version)
        training.optimizer.step()
    return meter.read().peak_bytes


def _each_tensor(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.state_dict().items():
        yield name, value.full_tensor()


def _full_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    yield from state.items()


def _send(
    address: str, version: int, tensors: Iterator[tuple[str, Tensor]], model: nn.Module
) -> None:
    """What trainers do: rank 0 sends whole tensors, converted, as they come."""
    kinds = {n: Entry.of(n, torch.bfloat16, v.shape) for n, v in model.state_dict().items()}
    if dist.get_rank():
        for _ in tensors:  # they are gathered on all ranks
            pass
    else:
        digests: dict[str, int] = {}
        with closing(SocketTarget(address).open()) as sending:
            sending.begin(Update(version, None, 1, f"{version}", kinds), 0)
            for name, value in tensors:
                converted = value.to(torch.bfloat16)
                digests[name] = digest_of(converted)
                block = Block((0,) * converted.ndim, tuple(converted.shape))
                sending.send(Patch.whole(name, block, converted))
            sending.end()
            sending.commit(digests)
    dist.barrier()
