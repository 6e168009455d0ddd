"""What the tiers take: predicted from plans, and counted while running. All sizes are in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from polyshard_offload.optimizer.step import StateOffload
from polyshard_offload.optimizer.wrap import wrapping_of
from polyshard_offload.resources import Resources
from polyshard_offload.shards.disk_storage import DiskStorage
from polyshard_offload.shards.gradients import HostGradients
from polyshard_offload.tiers.host_memory import pages
from polyshard_offload.tiers.private_window import writes_show
from polyshard_offload.tiers.state_store import HostStore


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank, beside what the engine uses by itself.

    ``staging`` holds shards on their way to a gather: on the device, or on the host where a codec
    reads them there. ``buffers`` is where the optimizer steps: chunks of state, and opened shards
    of parameters on disk. ``bounce`` is host memory that direct I/O
    needs for what is not page-aligned. ``host`` and ``disk`` are what rests there.
    """

    staging: int
    buffers: int
    bounce: int
    host: int
    disk: int

    @override
    def __str__(self) -> str:
        parts = (("staging", self.staging), ("step buffers", self.buffers), ("bounce", self.bounce))
        rest = (("host", self.host), ("disk", self.disk))
        return ", ".join(f"{name} {nbytes / 2**20:.1f} MiB" for name, nbytes in (*parts, *rest))


def _offloads(optimizers: Sequence[torch.optim.Optimizer]) -> list[StateOffload]:
    found = (wrapping_of(optimizer) for optimizer in optimizers)
    return [wrapping.offload for wrapping in found if wrapping is not None]


def resting(resources: Resources, offloads: Iterable[StateOffload]) -> Counter[tuple[str, str]]:
    """Bytes at rest by tier (``"host"``, ``"disk"``) and kind of content, in whole pages."""
    found: Counter[tuple[str, str]] = Counter()
    for storage in resources.storages:
        nbytes = pages(storage.shard_bytes)
        found["disk" if isinstance(storage, DiskStorage) else "host", "parameters"] += nbytes
        in_host = isinstance(storage.gradients, HostGradients)
        key = ("host" if in_host else "disk", "gradients")
        # Stepped in backward they are there group by group.
        found[key] = (
            max(found[key], nbytes) if resources.settings.step_in_backward else found[key] + nbytes
        )
    for offload in offloads:
        kept = sum(slot.nbytes for slot in offload.state.every_slot.values())
        in_host = isinstance(offload.state.store, HostStore)
        found["host" if in_host else "disk", "optimizer state"] += kept
    return found


def predicted(resources: Resources, optimizers: Sequence[torch.optim.Optimizer]) -> Memory:
    """From shards and records alone; nothing need have run."""
    return _memory(resources, _offloads(optimizers))


def _memory(resources: Resources, offloads: Sequence[StateOffload]) -> Memory:
    found = resting(resources, offloads)
    sizes = [storage.staged_bytes for storage in resources.storages]
    host = sum(nbytes for (tier, _), nbytes in found.items() if tier == "host")
    disk = sum(nbytes for (tier, _), nbytes in found.items() if tier == "disk")
    buffers = sum(offload.buffer_bytes() for offload in offloads)
    return Memory(_staging(resources, sizes), buffers, _bounce(resources), host, disk)


def notices(resources: Resources, offloads: Sequence[StateOffload]) -> tuple[str, ...]:
    """What ``describe()`` says of the tiers as a whole; equal for all groups, so said once.

    Bytes are this rank's, for all models and optimizers that share the plugin object.
    """
    return tuple(_lines(resources, offloads))


def _lines(resources: Resources, offloads: Sequence[StateOffload]) -> Iterator[str]:
    optimizer_tier = resources.settings.optimizer
    found, memory = resting(resources, offloads), _memory(resources, offloads)
    for tier, total in (("host", memory.host), ("disk", memory.disk)):
        kinds = ", ".join(f"{kind} {n:,}" for (t, kind), n in sorted(found.items()) if t == tier)
        if total:
            yield f"offload: {total:,} bytes in all on {tier}: {kinds}"
    if optimizer_tier != "device" and not offloads:
        yield f"offload: optimizer state goes to {optimizer_tier} once wrap() has the optimizer"
    file = resources.files.get("parameters")
    if file is not None and file.verifies and not writes_show():
        yield (
            "offload: checksums of parameters are not kept: this kernel does not say which pages "
            "were written to (/proc/self/pagemap)"
        )
    parts = (
        ("staging of shards", memory.staging),
        ("step buffers", memory.buffers),
        ("direct I/O on the host", memory.bounce),
    )
    passing = ", ".join(f"{name} {nbytes:,}" for name, nbytes in parts if nbytes)
    if passing:
        yield f"offload: bytes at most in passing: {passing}"


def _bounce(resources: Resources) -> int:
    """A block for every thread, if shards or gradients move to and from the disk."""
    moves = any(
        isinstance(storage, DiskStorage) or not isinstance(storage.gradients, HostGradients)
        for storage in resources.storages
    )
    settings = resources.settings.disk
    return settings.io_threads * settings.block_bytes if moves and settings.direct else 0


def _staging(resources: Resources, sizes: list[int]) -> int:
    """The largest shards that can be on the device together.

    In backward a unit's shard is there until its gather ends, the next unit's gather has started,
    and those after it are prefetched.
    """
    if not sizes:
        return 0
    together = 2 + max(storage.prefetch_units for storage in resources.storages)
    return sum(sorted(sizes)[-together:])


def measured(resources: Resources, optimizers: Sequence[torch.optim.Optimizer]) -> Memory:
    """What counters say was used at most."""
    buffers = sum(o.pipeline.buffer_bytes for o in _offloads(optimizers))
    return Memory(
        resources.staging.peak_bytes,
        buffers + resources.step_staging.peak_bytes,
        resources.pool.bounce_bytes,
        sum(arena.peak_bytes for arena in resources.arenas.values()),
        sum(file.reserved_bytes for file in resources.files.values()),
    )
