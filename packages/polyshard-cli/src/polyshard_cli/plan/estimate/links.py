"""How long bytes take among the ranks of an axis."""

from __future__ import annotations

import math
from dataclasses import replace

from polyshard.hardware import ring_bandwidth, rings
from polyshard_cli.plan.estimate.machines import Link, Machine
from polyshard_cli.plan.estimate.traffic import Transfer
from polyshard_cli.plan.request.mesh import MeshSpec


def link_of(axis: str, mesh: MeshSpec, machine: Machine) -> Link:
    """What ranks of ``axis`` talk over: within a host if all of its ranks are on one.

    NCCL's rings leave a host by the network card of each rank that the axis has there. gloo's
    ranks send to each other directly.
    """
    ranks, hosts = _place(axis, mesh, machine)
    if hosts == 1:
        return machine.inside
    together = ranks if machine.backend == "nccl" else hosts
    inside, between = machine.inside.bytes_per_second, machine.between.bytes_per_second
    rate = ring_bandwidth(together, hosts, inside, between)
    return replace(machine.between, bytes_per_second=rate)


def seconds_of_transfer(transfer: Transfer, mesh: MeshSpec, machine: Machine) -> float:
    """Of all calls of ``transfer``, alone on its links."""
    ranks, hosts = _place(transfer.axis, mesh, machine)
    nbytes, calls = transfer.sent_bytes, transfer.calls
    if machine.protocols:
        speeds = machine.inside.bytes_per_second, machine.between.bytes_per_second
        ways = 2 if transfer.collective == "all-reduce" else 1
        found = rings(ranks, hosts, *speeds, machine.protocols)
        return min(ring.seconds(nbytes, calls=calls, ways=ways) for ring in found)
    own = machine.transfer_seconds
    if not transfer.is_counted:  # a ring of fewer ranks has fewer turns
        own = machine.collective_seconds * (ranks - 1)
    link = link_of(transfer.axis, mesh, machine)
    seconds = calls * (own or link.latency_seconds) + nbytes / link.bytes_per_second
    if transfer.collective in ("reduce-scatter", "all-reduce"):  # reads two, and writes one
        seconds += 3 * nbytes / machine.memory_bytes_per_second
    return seconds


def _place(axis: str, mesh: MeshSpec, machine: Machine) -> tuple[int, int]:
    """Ranks of ``axis``, and hosts that they are on; two on one for what is no axis of the mesh."""
    inner = 1
    for found in reversed(mesh.axes):
        if found.name == axis:
            on_host = min(found.size, max(1, machine.ranks_per_host // inner))
            return found.size, math.ceil(found.size / on_host)
        inner *= found.size
    return 2, 1
