"""Public figures of accelerators and their networks, and how long NCCL's rings take there.

``polyshard plan`` estimates steps with them, and the virtual clock of polyshard-sim runs on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

__all__ = ["MACHINES", "NCCL_RINGS", "Hardware", "Protocol", "Ring", "ring_bandwidth", "rings"]

GIGA = 10**9
_H100 = "NVIDIA H100 Tensor Core GPU, www.nvidia.com/en-us/data-center/h100 (SXM, dense)"
_H200 = "NVIDIA H200 Tensor Core GPU, www.nvidia.com/en-us/data-center/h200 (SXM, dense)"
_A100 = "NVIDIA A100 Tensor Core GPU, www.nvidia.com/en-us/data-center/a100 (80 GB SXM, dense)"
_DGX_H100 = (
    "network: one 400 Gb/s ConnectX-7 a GPU, NVIDIA DGX H100/H200 User Guide, docs.nvidia.com/dgx"
)
_DGX_A100 = (
    "network: one 200 Gb/s ConnectX-6 a GPU, NVIDIA DGX A100 User Guide, docs.nvidia.com/dgx"
)


class Protocol(NamedTuple):
    """How ranks pass parts around a ring: microseconds, and the part of the bandwidth reached."""

    start_us: float
    nvlink_us: float
    """Latency from one rank to the next of a node."""
    network_us: float
    """From a node to the next."""
    part_of_bandwidth: float


NCCL_RINGS = (Protocol(8.4, 3.4, 14.0, 1.0), Protocol(14.0, 1.9, 4.0, 0.92))
"""``Simple`` and ``LL128`` of NCCL's tuning model (github.com/NVIDIA/nccl, src/graph/tuning.cc)."""


class Ring(NamedTuple):
    """One protocol on the ranks of a group."""

    start_us: float
    around_us: float
    """Latency of one way around, in microseconds."""
    bytes_per_us: float

    def seconds(self, nbytes: float, *, calls: int = 1, ways: int = 1) -> float:
        """Seconds of collectives in which a rank sends ``nbytes`` in all.

        Args:
            nbytes: that leave the rank.
            calls: how many collectives there are.
            ways: around the ring: 2 to reduce and gather what was reduced.
        """
        latency = calls * (self.start_us + ways * self.around_us)
        return (latency + nbytes / self.bytes_per_us) / 1e6


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Nodes of accelerators, one for each rank. The defaults are public figures of H100 nodes.

    Bandwidths are one direction's half of what data sheets give for both.
    """

    ranks_per_node: int = 8
    memory_bytes: int = 80 * GIGA
    half_flops_per_second: float = 989e12
    """Of matrix products in bfloat16 and float16, dense."""
    float_flops_per_second: float = 67e12
    """In float32, without TF32."""
    efficiency: float = 0.6
    """Part of these that products of a model reach. Assumed."""
    memory_bytes_per_second: float = 3350e9
    host_bytes_per_second: float = 64e9
    """Between the device and the host's memory."""
    nvlink_bytes_per_second: float = 450e9
    """From a rank to another one of its node."""
    network_bytes_per_second: float = 50e9
    """From a rank to other nodes."""
    launch_seconds: float = 5e-6
    """Of the host, for each launch. Assumed."""
    protocols: Sequence[Protocol] = NCCL_RINGS
    """A collective uses the fastest."""
    sources: tuple[str, ...] = (_H100, _DGX_H100)

    def rings(self, ranks: Sequence[int]) -> list[Ring]:
        """Those of a group of these ranks."""
        nodes = len({rank // self.ranks_per_node for rank in ranks})
        speeds = self.nvlink_bytes_per_second, self.network_bytes_per_second
        return rings(len(ranks), nodes, *speeds, self.protocols)


MACHINES: Final[Mapping[str, Hardware]] = MappingProxyType(
    {
        "h100x8": Hardware(),
        "h200x8": replace(
            Hardware(),
            memory_bytes=141 * GIGA,
            memory_bytes_per_second=4800e9,
            sources=(_H200, _DGX_H100),
        ),
        "a100x8": Hardware(
            memory_bytes=80 * GIGA,
            half_flops_per_second=312e12,
            float_flops_per_second=19.5e12,
            memory_bytes_per_second=2039e9,
            host_bytes_per_second=32e9,
            nvlink_bytes_per_second=300e9,
            network_bytes_per_second=25e9,
            sources=(_A100, _DGX_A100),
        ),
    }
)
"""By name."""


def ring_bandwidth(ranks: int, nodes: int, nvlink: float, network: float) -> float:
    """Bytes a second at which each rank sends.

    There are as many rings as ranks of a node, and each leaves the node at another rank: nodes have
    the network of all those ranks between them.
    """
    return nvlink if nodes == 1 else min(nvlink, network * ranks / nodes)


def rings(
    ranks: int, nodes: int, nvlink: float, network: float, protocols: Sequence[Protocol]
) -> list[Ring]:
    """The rings of a group, one for each protocol; a collective uses the fastest.

    Args:
        ranks: of the group.
        nodes: that they are on, equally many on each.
        nvlink: bytes a second from a rank to another one of its node.
        network: bytes a second from a rank to other nodes.
        protocols: what may be used.
    """
    rate = ring_bandwidth(ranks, nodes, nvlink, network)
    between = nodes - 1
    inside = ranks - 1 - between
    return [
        Ring(
            one.start_us if ranks > 1 else 0.0,
            inside * one.nvlink_us + between * one.network_us,
            rate * one.part_of_bandwidth / 1e6,
        )
        for one in protocols
    ]
