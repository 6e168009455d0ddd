"""Hosts that know each other by name, as those of a cluster do; torchft reaches groups by names."""

from __future__ import annotations

from pathlib import Path

from polyshard_testing.hosts import Host, Network


def name_of(host: Host) -> str:
    """``node1`` and on."""
    return f"node{host.address.rpartition('.')[2]}"


def write_names(file: Path, network: Network) -> None:
    """Write /etc/hosts of every host."""
    lines = [f"{host.address} {name_of(host)}" for host in (network.switch, *network.hosts)]
    file.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n", encoding="utf-8")


def named(host: Host, names: Path) -> list[str]:
    """What a command starts with to run on a host that knows its name and those in ``names``.

    The machine keeps its own name and its own /etc/hosts.
    """
    inside = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
    shell = ["sh", "-c", inside, str(names), name_of(host)]
    return [*host.prefix, "unshare", "--uts", "--mount", *shell]
