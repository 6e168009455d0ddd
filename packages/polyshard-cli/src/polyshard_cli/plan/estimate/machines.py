"""Machines that time is estimated for: a table with sources, or a file that ``--measure`` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from polyshard import hardware
from polyshard.files import replace_file
from polyshard.hardware import Hardware, Protocol
from polyshard_cli.plan.errors import PlanError, nearest
from polyshard_cli.plan.request.settings import Backend


@dataclass(frozen=True)
class Link:
    """What one rank can send: bytes a second in one direction, and seconds until the first."""

    bytes_per_second: float
    latency_seconds: float = 0.0


@dataclass(frozen=True)
class Roof:
    """What matrix products reach, by their operations for each byte that they touch.

    After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
    multicore architectures", CACM 52(4), 2009; measured, instead of drawn from two peaks.
    """

    points: tuple[tuple[float, float], ...]
    """Operations a byte, and operations a second; the former rise."""

    def flops_per_second(self, intensity: float) -> float:
        """Between two points as the line through their logarithms; beside them, memory's speed."""
        (first, slow), (last, fast) = self.points[0], self.points[-1]
        if intensity <= first:
            return slow * intensity / first
        if intensity >= last:
            return fast
        for (low, below), (high, above) in pairwise(self.points):
            if intensity <= high:
                part = math.log(intensity / low) / math.log(high / low)
                return math.exp(math.log(below) + part * math.log(above / below))
        return fast


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One rank's share of a machine."""

    name: str
    backend: Backend
    ranks_per_host: int
    memory_bytes: int
    """Of a rank's device; 0 where that is not known."""
    flops_per_second: Mapping[str, float]
    """Of matrix products at their peak, by dtype."""
    efficiency: float
    """Part of that peak that matrix products of a model reach."""
    memory_bytes_per_second: float
    operation_seconds: float
    """From one operation to the next, where neither computes much."""
    products: Mapping[str, Roof] = field(default_factory=dict)
    """By dtype: what products reach, where that was measured."""
    is_ahead: bool = True
    """Whether operations are launched while earlier ones compute, as on an accelerator; if not,
    the host is the device."""
    overlap: float = 1.0
    """Part of a transfer that is free beside compute: 0 where the same cores do both."""
    optimizer_bytes_per_second: float = 0.0
    """What a fused optimizer reads and writes; 0: as fast as memory is."""
    codec_bytes_per_second: float = 0.0
    """What codecs read and write; 0: as fast as memory is."""
    divided_seconds: float = 0.0
    """Of an operation on ``DTensor``s beside those on their parts; 0 where that is not known."""
    transfer_seconds: float = 0.0
    """Of a transfer of the engine's beside its bytes; 0: the link's latency."""
    collective_seconds: float = 0.0
    """Of a collective of the model's own for each other rank; 0: the link's latency."""
    inside: Link
    """To ranks of the same host."""
    between: Link
    """To ranks of other hosts."""
    protocols: tuple[Protocol, ...] = ()
    """Of rings that add up while they send, whose latency stands for the links'; none: a transfer
    takes its link's latency once, and what it adds up is read and written beside it."""
    host_bytes_per_second: float
    """Between the device and the host's memory, in one direction."""
    sources: tuple[str, ...]
    """Where figures come from, and which are assumed."""


LATENCIES = "latencies: NCCL's tuning model, src/graph/tuning.cc, github.com/NVIDIA/nccl"


def _machine(name: str, known: Hardware) -> Machine:
    assumed = (
        f"assumed: matrix products reach {known.efficiency} of the peak, "
        f"{known.launch_seconds * 1e6:g} microseconds an operation; measure yours with --measure"
    )
    return Machine(
        name=name,
        backend="nccl",
        ranks_per_host=known.ranks_per_node,
        memory_bytes=known.memory_bytes,
        flops_per_second={
            "bfloat16": known.half_flops_per_second,
            "float32": known.float_flops_per_second,
        },
        efficiency=known.efficiency,
        memory_bytes_per_second=known.memory_bytes_per_second,
        operation_seconds=known.launch_seconds,
        inside=Link(known.nvlink_bytes_per_second),
        between=Link(known.network_bytes_per_second),
        protocols=tuple(known.protocols),
        host_bytes_per_second=known.host_bytes_per_second,
        sources=(*known.sources, LATENCIES, assumed),
    )


MACHINES: Final[Mapping[str, Machine]] = MappingProxyType(
    {name: _machine(name, known) for name, known in hardware.MACHINES.items()}
)
"""Per GPU."""


def load_machine(name: str) -> Machine:
    """The machine of that name, or in that file."""
    if name in MACHINES:
        return MACHINES[name]
    if not name.endswith(".json"):
        raise PlanError(
            f"--machine {name}: no machine has this name; did you mean "
            f"{nearest(name, MACHINES, 0)}? Known: {', '.join(MACHINES)}, or "
            "a file.json that polyshard plan --measure file.json wrote"
        )
    try:
        found = json.loads(Path(name).read_text("utf-8"))
        made: dict[str, Any] = {key: Link(**found.pop(key)) for key in ("inside", "between")}
        roofs = found.pop("products").items()
        made["products"] = {
            dtype: Roof(tuple((float(low), float(rate)) for low, rate in roof["points"]))
            for dtype, roof in roofs
        }
        made["protocols"] = tuple(Protocol(*one) for one in found.pop("protocols", ()))
        return Machine(**found | made | {"sources": tuple(found["sources"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError(
            f"--machine {name}: cannot be read ({type(error).__name__}: {error}); write one with "
            f"polyshard plan --measure {name}; it has {', '.join(f.name for f in fields(Machine))}"
        ) from error


def check_target(path: Path) -> None:
    """Refuse early what :func:`save_machine` could not write, or :func:`load_machine` find."""
    if path.suffix != ".json" or path.is_dir():
        raise PlanError(f"--measure {path}: name a file that ends in .json, such as machine.json")
    if not path.parent.is_dir():
        raise PlanError(f"--measure {path}: there is no directory {path.parent}; make it first")


def save_machine(machine: Machine, path: Path) -> None:
    """Write ``machine`` to where :func:`load_machine` finds it, whole or not at all."""
    try:
        replace_file(path, (json.dumps(asdict(machine), indent=2) + "\n").encode())
    except OSError as error:
        raise PlanError(f"--measure {path}: cannot be written ({error.strerror})") from error
