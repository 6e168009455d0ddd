"""Ranks that share no loopback: each on a host of its own, with a link of a chosen speed.

Needs root, ``ip`` and ``tc`` of iproute2, and a kernel with veth and tbf.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.harness import every_rank
from polyshard_testing.hosts import INTERFACE, network

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """One end of a link; ``namespace`` is empty where there are none."""

    namespace: str = ""
    address: str = "127.0.0.1"
    interface: str = "lo"

    def enter(self) -> None:
        """Have this thread, and those it starts, live there."""
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
    """Hosts with a link of ``rate`` both ways, spelt as ``tc`` does (``1gbit``).

    Without a rate, all share the loopback.
    """
    if not rate:
        yield [Host()] * count
        return
    with network(count) as joined:
        for host in joined.hosts:
            joined.slow(host, rate, burst="512kb")
        yield [Host(host.name, host.address, INTERFACE) for host in joined.hosts]


def run_hosts(hosts: list[Host], work: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``work(host, *args)`` returns on fresh ranks, one on each host."""
    with tempfile.TemporaryDirectory(prefix="polyshard-bench-") as folder:
        return every_rank(len(hosts), _at_home, hosts, f"{folder}/store", work, args)


def _at_home(hosts: list[Host], store: str, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # it was made on the loopback
    hosts[rank].enter()
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found = work(hosts[rank], *args)
    dist.barrier()
    return found
