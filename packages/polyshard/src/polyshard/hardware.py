"""Public figures of accelerators and their networks, and how long NCCL's rings take there.

``polyshard plan`` estimates steps with them, and the virtual clock of polyshard-sim runs on them.
Bandwidths are one direction's half of what data sheets give for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = [
    "EFFICIENCY",
    "LAUNCH_SECONDS",
    "NCCL_RINGS",
    "NODES",
    "Node",
    "Protocol",
    "Ring",
    "ring_bandwidth",
    "rings",
]

EFFICIENCY = 0.6
"""Part of the peak that matrix products of a model reach. Assumed."""
LAUNCH_SECONDS = 5e-6
"""Of the host, for each operation that it launches. Assumed."""
GIGA = 10**9


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host with accelerators, one for each rank. Figures are those of one accelerator."""

    ranks: int = 8
    memory_bytes: int
    half_flops_per_second: float
    """Of matrix products in bfloat16 and float16, dense."""
    float_flops_per_second: float
    """In float32, without TF32."""
    memory_bytes_per_second: float
    host_bytes_per_second: float
    """Between the device and the host's memory."""
    nvlink_bytes_per_second: float
    """From a rank to the others of its node."""
    network_bytes_per_second: float
    """From a rank to other nodes."""
    sources: tuple[str, ...]


_HOPPER_NETWORK = (
    "network: one 400 Gb/s ConnectX-7 a GPU, NVIDIA DGX H100/H200 User Guide, docs.nvidia.com/dgx"
)
NODES: Final[Mapping[str, Node]] = MappingProxyType(
    {
        "h100x8": Node(
            memory_bytes=80 * GIGA,
            half_flops_per_second=989e12,
            float_flops_per_second=67e12,
            memory_bytes_per_second=3350e9,
            host_bytes_per_second=64e9,
            nvlink_bytes_per_second=450e9,
            network_bytes_per_second=50e9,
            sources=(
                "NVIDIA H100 Tensor Core GPU, www.nvidia.com/en-us/data-center/h100 (SXM, dense)",
                _HOPPER_NETWORK,
            ),
        ),
        "h200x8": Node(
            memory_bytes=141 * GIGA,
            half_flops_per_second=989e12,
            float_flops_per_second=67e12,
            memory_bytes_per_second=4800e9,
            host_bytes_per_second=64e9,
            nvlink_bytes_per_second=450e9,
            network_bytes_per_second=50e9,
            sources=(
                "NVIDIA H200 Tensor Core GPU, www.nvidia.com/en-us/data-center/h200 (SXM, dense)",
                _HOPPER_NETWORK,
            ),
        ),
        "a100x8": Node(
            memory_bytes=80 * GIGA,
            half_flops_per_second=312e12,
            float_flops_per_second=19.5e12,
            memory_bytes_per_second=2039e9,
            host_bytes_per_second=32e9,
            nvlink_bytes_per_second=300e9,
            network_bytes_per_second=25e9,
            sources=(
                "NVIDIA A100 Tensor Core GPU, www.nvidia.com/en-us/data-center/a100 "
                "(80 GB SXM, dense)",
                "network: one 200 Gb/s ConnectX-6 a GPU, NVIDIA DGX A100 User Guide, "
                "docs.nvidia.com/dgx",
            ),
        ),
    }
)
"""By name."""


@dataclass(frozen=True)
class Protocol:
    """How ranks pass parts around a ring: microseconds, and the part of the bandwidth reached."""

    start_us: float
    nvlink_us: float
    """Latency from one rank to the next of a node."""
    network_us: float
    """From a node to the next."""
    part_of_bandwidth: float


NCCL_RINGS = (Protocol(8.4, 3.4, 14.0, 1.0), Protocol(14.0, 1.9, 4.0, 0.92))
"""``Simple`` and ``LL128`` of NCCL's tuning model (github.com/NVIDIA/nccl, src/graph/tuning.cc)."""


@dataclass(frozen=True)
class Ring:
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
