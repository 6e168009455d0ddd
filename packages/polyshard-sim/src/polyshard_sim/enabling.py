"""Turning the device on, and what it has counted."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from polyshard_sim import _torch_private as private
from polyshard_sim.building import extension, missing_tools
from polyshard_sim.clock import Hardware
from polyshard_sim.errors import SimError

Mode = Literal["threads", "random", "lowest", "highest"]
_CAPACITY = 80 * 1024**3
MOST_DEVICES = 16


def is_buildable() -> bool:
    """Whether the device can be compiled here: Linux, a C++ compiler and ninja."""
    return not missing_tools()


def enable(
    mode: Mode = "threads",
    seed: int = 0,
    jitter_us: int = 200,
    capacity_bytes: int | None = None,
    strict: bool = False,
    devices: int = 8,
    clock: Hardware | None = None,
) -> None:
    """Register the device type ``sim`` with torch; once a process.

    The first call on a machine compiles the device, which takes a minute or two. A later call with
    the same settings does nothing.

    Args:
        mode: ``threads`` runs each stream in a thread, with random delays. The other three run
            nothing before the host waits, and then the heads of streams that are ready: in random
            order, of the lowest or of the highest stream first. They need no delays and are
            faster. No mode finds all mistakes; use all four.
        seed: of the delays and of the random order.
        jitter_us: the longest delay before a kernel in mode ``threads``, in microseconds.
        capacity_bytes: of the memory of each device; 80 GiB by default.
        strict: freed memory is overwritten at once on the stream that owns it. Torch's FSDP2
            legally fails that.
        devices: how many devices there are.
        clock: nothing is computed, collectives need no other ranks, and everything takes its
            modelled time on this hardware (:mod:`polyshard_sim.clock`). Values of tensors mean
            nothing then, and ``mode``, ``seed``, ``jitter_us`` and ``strict`` must be left out.

    Raises:
        ValueError: for an unknown mode, or one beside ``clock``; for no devices or more than 16,
            or devices without memory.
        SimError: where the device cannot be compiled, another one has the place, or this one was
            enabled with other settings.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, not {mode!r}")
    if clock is not None and (mode, seed, jitter_us, strict) != ("threads", 0, 200, False):
        raise ValueError("with clock nothing runs: leave out mode, seed, jitter_us and strict")
    if not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"devices must be between 1 and {MOST_DEVICES}, not {devices}")
    if capacity_bytes is not None and capacity_bytes <= 0:
        raise ValueError(f"capacity_bytes must be positive, not {capacity_bytes}")
    if (name := private.claimed_name()) not in {"privateuseone", "sim"}:
        raise SimError(
            f"the device type {name!r} has torch's one place for device types of extensions; "
            "polyshard-sim needs a process without it"
        )
    given = (mode, seed, jitter_us, capacity_bytes or _CAPACITY, strict, devices, clock)
    if (module := getattr(torch, "sim", None)) is not None:
        if module.settings != module.Settings(*given):
            raise SimError(
                f"the device was enabled with {module.settings}, and these cannot change within a "
                f"process; {module.Settings(*given)} needs another one"
            )
        return
    extension()  # raises before torch has been changed
    private.claim_device_type("sim")
    device: Any = importlib.import_module("polyshard_sim.device")
    device.start(device.Settings(*given))
    private.register_module("sim", device)


@dataclass(frozen=True)
class Counters:
    """What happened since the last :func:`reset_counters`; bytes are of this thread's device."""

    launches: int
    """Kernels, copies and collectives."""
    host_waits: int
    """Times that the host waited for the device."""
    collectives: int
    collective_bytes: int
    copies_to_device: int
    copies_to_host: int
    bytes_to_device: int
    bytes_to_host: int
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int


def counters() -> Counters:
    """What the device has counted."""
    device = _enabled()
    return Counters(
        **extension().read_counters(),
        allocated_bytes=device.memory_allocated(),
        peak_allocated_bytes=device.max_memory_allocated(),
        reserved_bytes=device.memory_reserved(),
        peak_reserved_bytes=device.max_memory_reserved(),
    )


def reset_counters() -> None:
    """Let all counters begin anew, and peaks at what is allocated now."""
    device = _enabled()
    extension().reset_counters()
    for index in range(device.device_count()):
        device.reset_peak_memory_stats(index)


def _enabled() -> Any:
    module = getattr(torch, "sim", None)
    if module is None:
        raise SimError("the device is not enabled; call polyshard_sim.enable() first")
    return module
