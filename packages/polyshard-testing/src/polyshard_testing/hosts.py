"""Hosts with addresses of their own on one machine: network namespaces joined by a bridge.

Every host is a namespace with one interface, ``eth0``, whose other end is a port of a bridge in a
namespace of its own, the switch. Nothing of the machine's own network is touched, and what happens
at a port (unplugged, slowed down) a host cannot tell from what happens on a wire.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

INTERFACE = "eth0"
NETWORK = "10.77.0"


class NoHostsError(Exception):
    """Why this machine cannot have them."""


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    address: str
    port: str
    """Its end of the wire in the switch."""

    @property
    def prefix(self) -> list[str]:
        """What a command starts with to run there."""
        return ["ip", "netns", "exec", self.name]

    def processes(self) -> list[int]:
        """Of everything that runs there."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]

    def crash(self) -> None:
        """Kill everything that runs there at once."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Network:
    """Hosts, and the switch between them, which is one more host."""

    switch: Host
    hosts: list[Host]

    def cut(self, host: Host) -> None:
        """Lose everything to and from ``host``; both sides see a link that is up."""
        _run("ip", "-n", self.switch.name, "link", "set", host.port, "nomaster")

    def mend(self, host: Host) -> None:
        """Plug it in again."""
        _run("ip", "-n", self.switch.name, "link", "set", host.port, "master", "bridge")

    def slow(self, host: Host, rate: str, burst: str = "16kb") -> None:
        """Let ``host`` send and receive no more than ``rate``, as tc spells it.

        Fast links need a ``burst`` of what passes between two ticks of the kernel's clock.
        """
        for name, device in ((self.switch.name, host.port), (host.name, INTERFACE)):
            _run(
                *("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf"),
                *("rate", rate, "burst", burst, "latency", "200ms"),
            )


@contextmanager
def network(count: int) -> Iterator[Network]:
    """``count`` hosts; at the end everything on them is killed, and they are gone.

    Raises:
        NoHostsError: saying what this machine lacks.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoHostsError(f"{' and '.join(missing)} not installed (iproute2)")
    prefix = f"polyshard-{uuid.uuid4().hex[:6]}"
    switch = Host(f"{prefix}-switch", f"{NETWORK}.254", "bridge")
    hosts = [Host(f"{prefix}-{n}", f"{NETWORK}.{n}", f"port{n}") for n in range(1, count + 1)]
    try:
        try:
            _make(switch, hosts)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or error
            raise NoHostsError(f"network namespaces are not permitted: {said}") from error
        yield Network(switch, hosts)
    finally:
        for host in (*hosts, switch):
            with suppress(OSError, subprocess.CalledProcessError):
                host.crash()
                _run("ip", "netns", "delete", host.name)


def _make(switch: Host, hosts: list[Host]) -> None:
    _run("ip", "netns", "add", switch.name)
    inside = ("ip", "-n", switch.name)
    _run(*inside, "link", "add", "bridge", "type", "bridge")
    _address(switch, "bridge")
    for host in hosts:
        _run("ip", "netns", "add", host.name)
        ends = ("type", "veth", "peer", "name", INTERFACE, "netns", host.name)
        _run(*inside, "link", "add", host.port, *ends)
        _run(*inside, "link", "set", host.port, "master", "bridge", "up")
        _address(host, INTERFACE)


def _address(host: Host, device: str) -> None:
    inside = ("ip", "-n", host.name)
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "address", "add", f"{host.address}/24", "dev", device)
    _run(*inside, "link", "set", device, "up")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
