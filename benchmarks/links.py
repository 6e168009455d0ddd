"""Ranks that share no loopback: network namespaces with a link of a chosen speed each, as hosts.

Needs root, ``ip`` and ``tc`` of iproute2, and a kernel with veth and tbf.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PREFIX = "pshardbench"
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """One end of a link; ``namespace`` is empty where there are none."""

    namespace: str = ""
    address: str = "127.0.0.1"
    interface: str = "lo"

    def enter(self) -> None:
        """Have this process live there."""
        torch.set_num_threads(1)
        if not self.namespace:
            return
        with open(f"/var/run/netns/{self.namespace}", "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def carried(self) -> int:
        """Bytes that have left it since it was made."""
        lines = Path("/proc/net/dev").read_text().splitlines()
        line = next(one for one in lines if f"{self.interface}:" in one)
        return int(line.partition(":")[2].split()[8])


@contextmanager
def linked(count: int, rate: str) -> Iterator[list[Host]]:
    """Namespaces around one that routes, each with a link of ``rate`` both ways; removed after.

    ``rate`` is spelt as ``tc`` does (``1gbit``); without one, hosts share the loopback.
    """
    if not rate:
        yield [Host()] * count
        return
    hub = f"{PREFIX}hub"

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    def at(namespace: str, *words: str) -> None:
        run("ip", "netns", "exec", namespace, *words)

    hosts = [Host(f"{PREFIX}{i}", f"10.213.{i}.2", f"ps{i}") for i in range(count)]
    names = [hub, *(host.namespace for host in hosts)]
    shape = ("root", "tbf", "rate", rate, "burst", "512kb", "latency", "50ms")
    try:
        for name in names:
            run("ip", "netns", "add", name)
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


def run_hosts(hosts: list[Host], work: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``work(host, *args)`` returns on fresh ranks, one on each host."""
    context = multiprocessing.get_context("spawn")
    pipes, ranks = [], []
    with tempfile.TemporaryDirectory(prefix="polyshard-bench-") as folder:
        try:
            for rank, host in enumerate(hosts):
                pipe, end = context.Pipe()
                told = (host, rank, len(hosts), f"{folder}/store", end, work, args)
                ranks.append(context.Process(target=_rank, args=told, daemon=True))
                ranks[-1].start()
                end.close()
                pipes.append(pipe)
            return [pipe.recv() for pipe in pipes]
        finally:
            for process in ranks:
                process.kill()


def _rank(
    host: Host,
    rank: int,
    ranks: int,
    store: str,
    pipe: Connection,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    host.enter()
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    pipe.send(work(host, *args))
    dist.barrier()
