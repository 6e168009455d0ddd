"""Hosts that know each other by name, as those of a cluster do; torchft reaches groups by names."""

from __future__ import annotations

from pathlib import Path

from polyshard_testing.hosts import Host, Network


def write_names(file: Path, network: Network) -> None:
    """Write what stands in /etc/hosts of every host: ``node1`` and on."""
    lines = [f"{host.address} node{place}" for place, host in enumerate(network.hosts, 1)]
    file.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n", encoding="utf-8")


def named(host: Host, name: str, names: Path) -> list[str]:
    """What a command starts with to run on a host that calls itself ``name``.

    The machine keeps its own name and its own /etc/hosts.
    """
    inside = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
    return [*host.prefix, "unshare", "--uts", "--mount", "sh", "-c", inside, str(names), name]
