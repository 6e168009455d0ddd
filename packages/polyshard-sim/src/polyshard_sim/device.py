"""``torch.sim``: the device module, in the shape of ``torch.cuda``."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from polyshard_sim._torch_private import DEVICE_TYPE, as_stream
from polyshard_sim.building import extension
from polyshard_sim.clock import BACKEND, Hardware, set_costs

_C = extension()
Device = torch.device | str | int | None


@dataclass(frozen=True)
class Settings:
    """What the device was enabled with; fixed for the life of the process."""

    mode: str
    seed: int
    jitter_us: int
    capacity_bytes: int
    strict: bool
    devices: int
    clock: Hardware | None


def _index(device: Device = None) -> int:
    if device is None:
        return int(_C.current_device())
    if isinstance(device, int):
        return device
    index = cast("int | None", torch.device(device).index)
    return int(_C.current_device()) if index is None else index


# ---- devices


def is_available() -> bool:
    """Whether there is a device: always."""
    return True


def is_initialized() -> bool:
    """Whether the device is ready: always."""
    return True


def init() -> None:
    """Nothing is left to do."""


def _lazy_init() -> None: ...


def device_count() -> int:
    """How many devices there are."""
    return int(_C.device_count())


def current_device() -> int:
    """The index of this thread's device."""
    return int(_C.current_device())


def set_device(device: Device) -> None:
    """Make ``device`` this thread's."""
    _C.set_device(_index(device))


def get_device_name(device: Device = None) -> str:
    """The name of a device."""
    del device
    return "sim"


def synchronize(device: Device = None) -> None:
    """Wait for all that was launched on a device; raises what a kernel has raised."""
    torch.accelerator.synchronize(_index(device))


class device:  # noqa: N801 - torch.cuda calls it so
    """Make a device current within a block."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)
        self._previous = -1

    def __enter__(self) -> None:
        self._previous = current_device()
        set_device(self._index)

    def __exit__(self, *error: object) -> None:
        set_device(self._previous)


# ---- streams and events


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Device = None, priority: int = 0, **known: Any) -> Stream:
        """Make a stream, or with the keywords of ``torch.Stream`` an object for a known one."""
        if "stream_id" in known:
            return super().__new__(cls, **known)
        place = torch.device("sim", _index(device))
        return super().__new__(cls, device=place, priority=priority)


def Event(  # noqa: N802
    enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
) -> torch.Event:
    """An event of the device; it counts as reached until it is recorded.

    It is torch's own: ``elapsed_time`` takes no other class.
    """
    return torch.Event(
        "sim", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
    )


def current_stream(device: Device = None) -> Stream:
    """The stream that this thread launches on."""
    found = torch.accelerator.current_stream(torch.device("sim", _index(device)))
    stream: Stream = as_stream(Stream, found)
    return stream


def default_stream(device: Device = None) -> Stream:
    """The stream that is current when no other was set."""
    index = _index(device)
    number = _C.default_stream_id(index)
    return Stream(stream_id=number, device_index=index, device_type=DEVICE_TYPE)


def set_stream(stream: torch.Stream | None) -> None:
    """Make ``stream`` the one that this thread launches on."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """Launch on ``stream`` within a block; with ``None``, change nothing."""
    if stream is None:
        yield None
        return
    index, previous = current_device(), current_stream(stream.device)
    set_device(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield stream
    finally:
        torch.accelerator.set_stream(previous)
        set_device(index)


StreamContext = stream

# ---- memory


def empty_cache() -> None:
    """Give back cached memory."""
    torch.accelerator.empty_cache()


def memory_allocated(device: Device = None) -> int:
    """Bytes that tensors have."""
    return int(torch.accelerator.memory_allocated(_index(device)))


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes that tensors had since the last reset."""
    return int(torch.accelerator.max_memory_allocated(_index(device)))


def memory_reserved(device: Device = None) -> int:
    """Bytes of segments, in use and cached."""
    return int(torch.accelerator.memory_reserved(_index(device)))


def max_memory_reserved(device: Device = None) -> int:
    """The most bytes of segments since the last reset."""
    return int(torch.accelerator.max_memory_reserved(_index(device)))


def reset_peak_memory_stats(device: Device = None) -> None:
    """Let peaks begin anew."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def memory_stats(device: Device = None) -> dict[str, Any]:
    """All statistics of the allocator, under the names of CUDA's."""
    return dict(torch.accelerator.memory_stats(_index(device)))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free bytes and capacity."""
    free, total = torch.accelerator.get_memory_info(_index(device))
    return int(free), int(total)


# ---- random numbers

default_generators: tuple[torch.Generator, ...] = ()  # filled by `start`


def manual_seed(seed: int) -> None:
    """Seed this thread's device."""
    default_generators[_index()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices."""
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    """The seed of this thread's device."""
    return default_generators[_index()].initial_seed()


def get_rng_state(device: Device = "sim") -> Tensor:
    """Seed and offset, in 16 bytes."""
    return default_generators[_index(device)].get_state()


def set_rng_state(state: Tensor, device: Device = "sim") -> None:
    """Go back to a state of :func:`get_rng_state`."""
    default_generators[_index(device)].set_state(state)


# ---- what torch asks of a device module


def _is_in_bad_fork() -> bool:
    return os.getpid() != _PROCESS


def get_amp_supported_dtype() -> list[torch.dtype]:
    """For ``torch.autocast("sim")``."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether bfloat16 may be used: as on the CPU, always."""
    del including_emulation
    return True


_PROCESS = os.getpid()
settings: Settings


def make_group(clock: Hardware | None, options: Any, _: object) -> Any:
    """The backend ``simccl``; without the other ranks where the clock is on."""
    rank, size = options.group_rank, options.group_size
    gloo = None
    if clock is None:
        gloo = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
        gloo._set_default_timeout(timedelta(days=30))  # the group's watchdog ends collectives
    rings = (clock or Hardware()).rings(options.global_ranks_in_group or range(size))
    return _C.make_group(gloo, rank, size, options.timeout.total_seconds(), rings)


def start(given: Settings) -> None:
    """Make the device work; once a process."""
    mode, clock = ("lowest" if given.clock else given.mode), given.clock
    _C.configure(mode, given.seed, given.jitter_us, given.strict, given.devices, clock is None)
    set_costs(clock or Hardware())
    _C.set_capacity(given.capacity_bytes)
    globals()["settings"] = given
    globals()["default_generators"] = tuple(map(_C.default_generator, range(given.devices)))
    dist.Backend.register_backend(
        BACKEND if clock else "simccl", partial(make_group, clock), True, ["sim"]
    )
    atexit.register(_C.shutdown)
