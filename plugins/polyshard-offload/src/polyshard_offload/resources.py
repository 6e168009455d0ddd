"""The memory and files behind one plugin object, made when first needed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from polyshard.agreement.failures import FailureReport
from polyshard.seams import GroupInfo, StorageFactory
from polyshard.sharding.layout import GroupLayout
from polyshard_offload._torch_private import local_of
from polyshard_offload.settings import DiskSettings, Tier
from polyshard_offload.shards.gradients import DiskGradients, GradientShelf, HostGradients
from polyshard_offload.shards.staging import StagingCount
from polyshard_offload.shards.storage import DiskShelf, HostShelf, Shelf
from polyshard_offload.tiers.block_io import Calls
from polyshard_offload.tiers.host_memory import Arena, may_pin
from polyshard_offload.tiers.io_pool import BlockPool
from polyshard_offload.tiers.state_store import DiskStore, HostStore, Store
from polyshard_offload.tiers.swap_file import SwapFile

if TYPE_CHECKING:
    from polyshard_offload.optimizer.step import StateOffload
    from polyshard_offload.plugin import Offload

FileKind = Literal["parameters", "gradients", "optimizer state"]


@dataclass(eq=False)
class Tiers:
    """Arenas by dtype, swap files by kind, the shelves of all groups, and wrapped optimizers.

    ``calls`` are the system calls that new files use. ``in_backward`` says that gradients are used
    when they land.
    """

    disk_settings: DiskSettings
    pin: bool | Literal["auto"]
    count: StagingCount = field(default_factory=StagingCount)
    bench_count: StagingCount = field(default_factory=StagingCount)
    arenas: dict[tuple[str, torch.dtype], Arena] = field(default_factory=dict)
    files: dict[FileKind, SwapFile] = field(default_factory=dict)
    shelves: weakref.WeakSet[Shelf] = field(default_factory=weakref.WeakSet)
    offloads: weakref.WeakSet[StateOffload] = field(default_factory=weakref.WeakSet)
    ranks: tuple[int, ...] = ()
    in_backward: bool = False
    calls: Calls = field(default_factory=Calls)

    @functools.cached_property
    def pool(self) -> BlockPool:
        """The threads of all files."""
        return BlockPool(self.disk_settings.io_threads, self.disk_settings.block_bytes)

    def arena(self, kind: str, dtype: torch.dtype) -> Arena:
        """The arena for ``kind`` of content in ``dtype``."""
        pinned = may_pin() if self.pin == "auto" else self.pin
        return self.arenas.setdefault((kind, dtype), Arena(pinned))

    def file(self, kind: FileKind) -> SwapFile:
        """The swap file that holds ``kind``.

        Raises:
            StorageError: when it cannot be made.
        """
        if kind not in self.files:
            self.files[kind] = SwapFile(
                self.disk_settings, kind, global_rank(), self.calls, self.pool
            )
        return self.files[kind]

    def note(self, group: GroupInfo) -> None:
        """Remember which ranks train together."""
        mesh: DeviceMesh | None = group.mesh  # there is none where only plans are looked at
        if mesh is not None and not self.ranks:
            self.ranks = tuple(sorted(int(rank) for rank in mesh.mesh.flatten()))

    @contextmanager
    def reported(self, where: str) -> Iterator[None]:
        """A block whose exceptions other ranks will quote instead of waiting in vain."""
        if not self.ranks:
            yield
            return
        with FailureReport(self.ranks, where):
            yield

    def shelf(self, params: Tier, grads: Tier, group: GroupInfo, prefetch: int) -> Shelf:
        """A place for the shard of ``group``."""
        gradients = self._gradients(grads, group.orig_dtype)
        shelf: Shelf
        if params == "disk":
            file, counts = self.file("parameters"), (self.count, self.bench_count)
            shelf = DiskShelf(file, group.device, counts[0], gradients, prefetch, counts[1])
        else:
            arena = self.arena("parameters", group.orig_dtype)
            shelf = HostShelf(arena, group.device, self.count, gradients, prefetch)
        self.shelves.add(shelf)  # the group owns it, and takes it along when the model goes
        return shelf

    def _gradients(self, tier: Tier, dtype: torch.dtype) -> GradientShelf:
        if tier == "disk":
            return DiskGradients(self.file("gradients"))
        return HostGradients(self.arena("gradients", dtype))

    def state_store(self, tier: Tier) -> Store:
        """A store for the state of one optimizer."""
        if tier == "disk":
            return DiskStore(self.file("optimizer state"))
        return HostStore(self.arena("optimizer state", torch.uint8))

    def norm_of(self, parameter: Tensor) -> Tensor | None:
        """The 2-norm of the local part of a gradient, where it is known without reading it."""
        found = (shelf.norms.of(parameter) for shelf in self.shelves)
        known = next((norm for norm in found if norm is not None), None)
        if known is None:
            spent = (o.in_backward.norm_of(parameter) for o in self.offloads if o.in_backward)
            known = next((norm for norm in spent if norm is not None), None)
        return known

    def shelf_of(self, parameter: Tensor) -> DiskShelf | None:
        """The shelf whose file holds ``parameter``, if one does."""
        address = local_of(parameter).data_ptr()
        for shelf in self.shelves:
            if isinstance(shelf, DiskShelf) and shelf.holds(address):
                return shelf
        return None


class ShelfFactory(StorageFactory):
    """Makes the shelf of one group."""

    def __init__(self, tiers: Tiers, settings: Offload) -> None:
        """Makes a shelf of the tiers that ``settings`` names."""
        self._tiers = tiers
        self._plugin = settings
        self._shelf: weakref.ref[Shelf] | None = None  # the group owns it

    @property
    @override
    def name(self) -> str:
        return self._plugin.params

    @property
    @override
    def settings(self) -> str:
        return f"gradients on {self._plugin.grads}"

    @property
    @override
    def notices(self) -> tuple[str, ...]:
        """Bytes of this group at rest, and those of all tiers."""
        shelf = self._shelf() if self._shelf is not None else None
        if shelf is None:
            return ()
        nbytes = shelf.shard_bytes
        return (
            f"offload: a shard of {nbytes:,} bytes on {self._plugin.params}, its gradient of "
            f"{nbytes:,} bytes on {self._plugin.grads}",
            *self._plugin.notices(),
        )

    @override
    def create(self, group: GroupInfo, layout: GroupLayout) -> Shelf:
        del layout
        plugin = self._plugin
        grads = plugin.grads or "host"
        shelf = self._tiers.shelf(plugin.params, grads, group, plugin.prefetch)
        self._shelf = weakref.ref(shelf)
        return shelf


def global_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
