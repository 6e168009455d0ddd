"""Two network namespaces joined by a link of a chosen speed, for ranks that share no loopback.

Needs root, ``ip`` and ``tc`` of iproute2, and a kernel with veth and tbf.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PREFIX = "polyshard-bench"


@dataclass(frozen=True)
class Node:
    """One end of the link."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """``words`` as a command that runs at this end."""
        return ["ip", "netns", "exec", self.namespace, *words]


NODES = tuple(Node(f"{PREFIX}{i}", f"pshard{i}", f"10.213.7.{i + 1}") for i in range(2))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def shaped_link(rate: str) -> Iterator[tuple[Node, ...]]:
    """Both ends of a link of ``rate`` each way, as ``tc`` spells it (``1gbit``); removed after."""
    try:
        for node in NODES:
            _run("ip", "netns", "add", node.namespace)
        first, second = NODES
        ends = ("type", "veth", "peer", "name", second.interface, "netns", second.namespace)
        _run("ip", "link", "add", first.interface, "netns", first.namespace, *ends)
        for node in NODES:
            _run(*node.command("ip", "addr", "add", f"{node.address}/24", "dev", node.interface))
            _run(*node.command("ip", "link", "set", node.interface, "up"))
            _run(*node.command("ip", "link", "set", "lo", "up"))
            shape = ("tbf", "rate", rate, "burst", "512kb", "latency", "50ms")
            words = ("tc", "qdisc", "add", "dev", node.interface, "root", *shape)
            _run(*node.command(*words))
        yield NODES
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", node.namespace], check=False, capture_output=True)
