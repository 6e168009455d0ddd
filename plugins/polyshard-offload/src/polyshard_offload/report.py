"""What the tiers take: predicted from plans, and counted while running. All sizes are in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from polyshard_offload.gradients import HostGradients
from polyshard_offload.memory import pages
from polyshard_offload.shelves import DiskShelf, HostShelf
from polyshard_offload.store import DiskStore, HostStore

if TYPE_CHECKING:
    from polyshard_offload.stepping import StateOffload
    from polyshard_offload.tiers import Tiers


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank, beside what the engine uses by itself.

    ``staging`` is on the device: shards on their way to a gather (and, where the optimizer steps
    beside parameters on the device, nothing else). ``buffers`` is where the optimizer steps: chunks
    of state, and opened shards of parameters on disk. ``bounce`` is host memory that direct I/O
    needs for what is not page-aligned. ``host`` and ``disk`` are what rests there.
    """

    staging: int
    buffers: int
    bounce: int
    host: int
    disk: int

    @override
    def __str__(self) -> str:
        """One line."""
        parts = (("staging", self.staging), ("step buffers", self.buffers), ("bounce", self.bounce))
        rest = (("host", self.host), ("disk", self.disk))
        return ", ".join(f"{name} {nbytes / 2**20:.1f} MiB" for name, nbytes in (*parts, *rest))


def _offloads(optimizers: Sequence[torch.optim.Optimizer]) -> list[StateOffload]:
    found = (o.__dict__.get("_polyshard_offload") for o in optimizers)
    return [offload for offload in found if offload is not None]


def predicted(tiers: Tiers, optimizers: Sequence[torch.optim.Optimizer]) -> Memory:
    """From shards and records alone; nothing need have run."""
    host = disk = 0
    sizes = [shelf.shard_bytes for shelf in tiers.shelves]
    for shelf in tiers.shelves:
        nbytes = pages(shelf.shard_bytes)
        host += nbytes if isinstance(shelf, HostShelf) else 0
        disk += nbytes if isinstance(shelf, DiskShelf) else 0
        in_host = isinstance(shelf.gradients, HostGradients)
        host += nbytes if in_host else 0
        disk += 0 if in_host else nbytes
    buffers = 0
    for offload in _offloads(optimizers):
        kept = sum(slot.nbytes for slot in offload.keeper.slots)
        host += kept if isinstance(offload.keeper.store, HostStore) else 0
        disk += kept if isinstance(offload.keeper.store, DiskStore) else 0
        buffers += offload.buffer_bytes()
    return Memory(_staging(tiers, sizes), buffers, _bounce(tiers), host, disk)


def _bounce(tiers: Tiers) -> int:
    """A block for every thread, if shards or gradients move to and from the disk."""
    moves = any(
        isinstance(shelf, DiskShelf) or not isinstance(shelf.gradients, HostGradients)
        for shelf in tiers.shelves
    )
    settings = tiers.disk_settings
    return settings.io_threads * settings.block_bytes if moves and settings.direct else 0


def _staging(tiers: Tiers, sizes: list[int]) -> int:
    """The largest shards that can be on the device together.

    In backward a unit's shard is there until its gather ends, the next unit's gather has started,
    and those after it are prefetched.
    """
    if not sizes:
        return 0
    together = 2 + max(shelf.prefetch_units for shelf in tiers.shelves)
    return sum(sorted(sizes)[-together:])


def measured(tiers: Tiers, optimizers: Sequence[torch.optim.Optimizer]) -> Memory:
    """What counters say was used at most."""
    buffers = sum(o.pipeline.buffer_bytes for o in _offloads(optimizers))
    return Memory(
        tiers.count.peak_bytes,
        buffers + tiers.bench_count.peak_bytes,
        tiers.pool.bounce_bytes,
        sum(arena.peak_bytes for arena in tiers.arenas.values()),
        sum(file.reserved_bytes for file in tiers.files.values()),
    )
