"""The virtual clock: modelled times of what is launched, on hardware of public figures.

::

    enable(clock=Hardware())
    with rank_of(64), record() as timeline:
        step()
    timeline.spans

It is a simulation: nothing is computed, and no time of real hardware is measured.

* A task begins when the one before it on its stream has ended and the host has launched it. A
  stream that waits for an event continues at the later of both times, and so does a waiting host.
* A kernel takes as long as its multiplications or its bytes take, whichever is more. Each stream
  has the whole device: what runs beside other work is not slowed down by it.
* A launch takes the host a constant time. Python's own time is not in it.
* All ranks are alike: a collective begins when this rank is ready. Those of one group follow one
  another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from polyshard.hardware import NCCL_RINGS, Hardware, Protocol
from polyshard_sim.building import extension
from polyshard_sim.errors import SimError

__all__ = [
    "HOST",
    "NCCL_RINGS",
    "Hardware",
    "Protocol",
    "Span",
    "Timeline",
    "host_time_us",
    "rank_of",
    "record",
]

HOST = -1
"""In :attr:`Span.awaited`: what was launched next had not been launched yet."""
BACKEND = "fake-simccl"
"""The process group of :func:`rank_of`, which has no other processes."""
_MICRO = 1e6
"""Microseconds of a second."""


@dataclass(frozen=True)
class Span:
    """What a stream did in an interval of the clock, in microseconds."""

    name: str
    """Of the operator or collective; ``wait`` and ``idle`` while nothing ran."""
    stream: int
    """Its ``stream_id``."""
    begin_us: float
    end_us: float
    awaited: int | None = None
    """For ``wait`` the stream that was waited for, for ``idle`` :data:`HOST`; else ``None``."""

    @property
    def duration_us(self) -> float:
        """How long it took."""
        return self.end_us - self.begin_us


@dataclass
class Timeline:
    """Filled at the end of :func:`record`."""

    spans: list[Span] = field(default_factory=list)
    """In the order of launches; those of one stream follow one another without gaps."""


@contextmanager
def rank_of(ranks: int, rank: int = 0) -> Iterator[None]:
    """Be one of so many ranks, without the others; the process must have no process group.

    Collectives of tensors on the device take their time, and leave their outputs as they are.

    Raises:
        SimError: where the device was enabled without ``clock``.
    """
    _require()
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def record() -> Iterator[Timeline]:
    """Record what is launched in a block; the clock must be on.

    Raises:
        SimError: where the device was enabled without ``clock``.
    """
    _require()
    device, timeline = extension(), Timeline()
    device.take_spans()
    device.trace_spans(True)
    try:
        yield timeline
    finally:
        device.trace_spans(False)
        timeline.spans += [
            Span(name, stream, begin, end, None if awaited < HOST else awaited)
            for name, stream, begin, end, awaited in device.take_spans()
        ]


def host_time_us() -> float:
    """The host's time of the clock."""
    _require()
    return float(extension().host_time_us())


def _require() -> None:
    device = getattr(torch, "sim", None)
    if device is None or device.settings.clock is None:
        raise SimError(
            "the device has no clock; call polyshard_sim.enable(clock=Hardware()) first, in a "
            "process that has not enabled it otherwise"
        )


def set_costs(hardware: Hardware) -> None:
    """Have the device take as long as ``hardware`` would."""
    flops = hardware.efficiency / _MICRO
    extension().set_costs(
        hardware.launch_seconds * _MICRO,
        hardware.half_flops_per_second * flops,
        hardware.float_flops_per_second * flops,
        hardware.memory_bytes_per_second / _MICRO,
        hardware.host_bytes_per_second / _MICRO,
    )
