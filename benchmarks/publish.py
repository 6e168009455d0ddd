"""A step's weights on their way to a generator: whole tensors from rank 0, or each rank its own.

    python -m benchmarks.publish --ranks 4      (root: each rank has a network namespace of its own)

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
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import polyshard
from benchmarks.harness import Found, command, in_turns, median_of, sharded
from polyshard_publish import Publisher, Receiver, ReceiverServer, SocketTarget
from polyshard_publish.blocks import Block
from polyshard_publish.digests import digest_of
from polyshard_publish.patches import Patch
from polyshard_publish.pieces import Entry
from polyshard_publish.wire import Update

PREFIX = "pshardpub"
CLONE_NEWNET = 0x40000000
FULL_TENSOR, STATE_DICT, WHOLE, PATCHES = "full_tensor", "rank 0", "published whole", "patches"
WAYS = (FULL_TENSOR, STATE_DICT, WHOLE, PATCHES)


@dataclass(frozen=True)
class Case:
    """What is measured."""

    ranks: int = 2
    width: int = 2048
    layers: int = 8
    turns: int = 3
    rate: str = "1gbit"

    def quick(self) -> Case:
        return replace(self, width=128, layers=2, turns=1)


def measure(case: Case) -> Found:
    """Medians of the turns; seconds of the slowest rank until the receiver serves the version."""
    has_links = os.geteuid() == 0
    with linked(case.ranks + 1, case.rate) if has_links else no_links(case.ranks + 1) as hosts:
        found = _run(case, hosts, _time)
        held = {way: _run(case, hosts, _hold, way)[0] for way in WAYS}
    seconds = found[0]["seconds"]
    return {
        "ranks": case.ranks,
        "link": case.rate if has_links else "none",
        "model_bytes": found[0]["model_bytes"],
        "seconds": seconds,
        "full_tensor_over": {way: seconds[FULL_TENSOR] / seconds[way] for way in WAYS},
        "rank_0_over": {way: seconds[STATE_DICT] / seconds[way] for way in WAYS},
        "link_bytes": {way: sum(one["bytes"][way] for one in found) for way in WAYS},
        "rank_0_bytes": held,
    }


def _run(case: Case, hosts: list[Host], work: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``work`` returns on each of fresh ranks beside a fresh receiver."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    store = tempfile.mktemp(prefix="polyshard-bench-")
    receiver = context.Process(target=_receive, args=(hosts[-1], theirs), daemon=True)
    receiver.start()
    addresses = ours.recv()
    pipes, ranks = [], []
    try:
        for rank in range(case.ranks):
            pipe, end = context.Pipe()
            told = (hosts[rank], rank, case, store, end, work, (addresses, *args))
            ranks.append(context.Process(target=_rank, args=told, daemon=True))
            ranks[-1].start()
            end.close()
            pipes.append(pipe)
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in (receiver, *ranks):
            process.kill()
        Path(store).unlink(missing_ok=True)


# Links ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """One end of a link; ``namespace`` is empty where there are none."""

    namespace: str
    address: str
    interface: str

    def enter(self) -> None:
        """Have this process live there."""
        if not self.namespace:
            return
        with open(f"/var/run/netns/{self.namespace}", "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def carried(self) -> int:
        """Bytes that have left it since it was made."""
        path = Path("/proc/net/dev")
        line = next(one for one in path.read_text().splitlines() if f"{self.interface}:" in one)
        return int(line.partition(":")[2].split()[8])


@contextmanager
def linked(count: int, rate: str) -> Iterator[list[Host]]:
    """Namespaces around one that routes, each with a link of ``rate`` both ways; removed after."""
    hub = f"{PREFIX}hub"

    def at(namespace: str, *words: str) -> None:
        subprocess.run(("ip", "netns", "exec", namespace, *words), check=True, capture_output=True)

    hosts = [Host(f"{PREFIX}{i}", f"10.213.{i}.2", f"ps{i}") for i in range(count)]
    names = [hub, *(host.namespace for host in hosts)]
    shape = ("root", "tbf", "rate", rate, "burst", "512kb", "latency", "50ms")
    try:
        for name in names:
            subprocess.run(("ip", "netns", "add", name), check=True, capture_output=True)
            at(name, "ip", "link", "set", "lo", "up")
        at(hub, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for number, host in enumerate(hosts):
            port, gateway = f"port{number}", f"10.213.{number}.1"
            peer = ("type", "veth", "peer", "name", port, "netns", hub)
            at(host.namespace, "ip", "link", "add", host.interface, *peer)
            ends = [(host.namespace, host.interface, host.address), (hub, port, gateway)]
            for name, interface, address in ends:
                at(name, "ip", "addr", "add", f"{address}/24", "dev", interface)
                at(name, "ip", "link", "set", interface, "up")
                at(name, "tc", "qdisc", "add", "dev", interface, *shape)
            at(host.namespace, "ip", "route", "add", "default", "via", gateway)
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def no_links(count: int) -> Iterator[list[Host]]:
    yield [Host("", "127.0.0.1", "lo")] * count


# Processes --------------------------------------------------------------------------------------


def _receive(host: Host, pipe: Connection) -> None:
    host.enter()
    torch.set_num_threads(1)
    servers = {way: ReceiverServer(Receiver(), host.address) for way in WAYS}
    pipe.send({way: server.address for way, server in servers.items()})
    time.sleep(3600)


def _rank(
    host: Host,
    rank: int,
    case: Case,
    store: str,
    pipe: Connection,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    host.enter()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, case.ranks), rank=rank, world_size=case.ranks
    )
    torch.manual_seed(0)
    layers = [nn.Linear(case.width, case.width) for _ in range(case.layers)]
    model = sharded(nn.Sequential(*layers), layers, polyshard.fully_shard)
    model(torch.randn(4, case.width)).square().mean().backward()  # the same gradient each time
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    pipe.send(work(host, case, model, optimizer, *args))
    dist.barrier()


def _publishing(way: str, model: nn.Module, address: str) -> Callable[[int], object]:
    """What publishes a version in a way."""
    if way == WHOLE:
        return Publisher(model, to=address, dtype=torch.bfloat16, keep="nothing").publish
    if way == PATCHES:
        return Publisher(model, to=address, dtype=torch.bfloat16, keep="values").publish
    whole = _each_tensor if way == FULL_TENSOR else _full_state
    return lambda version: _send(address, version, whole(model), model)


def _time(
    host: Host,
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    addresses: dict[str, str],
) -> Found:
    ways = {way: _publishing(way, model, addresses[way]) for way in WAYS}
    for way in ways.values():
        way(0)
    carried: dict[str, list[float]] = {way: [] for way in WAYS}
    stepped: set[int] = set()

    def timed(way: str) -> Callable[[int], float]:
        def turn(number: int) -> float:
            if number not in stepped:
                stepped.add(number)
                optimizer.step()
            dist.barrier()
            before = host.carried()
            begin = time.perf_counter()
            ways[way](number + 1)
            spent = torch.tensor(time.perf_counter() - begin)
            carried[way].append(host.carried() - before)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            return float(spent)

        return turn

    found = in_turns({way: timed(way) for way in WAYS}, case.turns)
    model_bytes = sum(parameter.numel() for parameter in model.parameters()) * 4
    return {"seconds": median_of(found), "bytes": median_of(carried), "model_bytes": model_bytes}


def _hold(
    host: Host,
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    addresses: dict[str, str],
    way: str,
) -> int:
    """Bytes that this rank held at most, beside what it held before the first of two versions."""
    optimizer.step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the highest becomes what is held now
    before = _memory("VmRSS")
    publish = _publishing(way, model, addresses[way])
    for version in range(2):
        publish(version)
        optimizer.step()
    return _memory("VmHWM") - before


def _memory(kind: str) -> int:
    """A figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])


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
    catalogue = {
        name: Entry.of(name, torch.bfloat16, value.shape)
        for name, value in model.state_dict().items()
    }
    sending = SocketTarget(address).open() if dist.get_rank() == 0 else None
    if sending is not None:
        sending.begin(Update(version, None, 1, f"{version}", catalogue), 0)
    digests: dict[str, int] = {}
    for name, value in tensors:
        if sending is not None:
            converted = value.to(torch.bfloat16)
            digests[name] = digest_of(converted)
            block = Block((0,) * converted.ndim, tuple(converted.shape))
            sending.send(Patch.whole(name, block, converted))
    if sending is not None:
        sending.end()
        sending.commit(digests)
        sending.close()
    dist.barrier()


if __name__ == "__main__":
    command(measure, Case(), __doc__)
