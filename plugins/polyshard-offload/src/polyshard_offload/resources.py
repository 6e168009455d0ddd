"""The memory and files behind one plugin object, made when first needed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from polyshard.failures import Part
from polyshard.plugins.seams import GroupInfo, StorageFactory, local_of
from polyshard.sharding.layout import GroupLayout
from polyshard_offload.settings import OffloadSettings, Tier
from polyshard_offload.shards.disk_storage import DiskStorage
from polyshard_offload.shards.gradients import DiskGradients, GradientStorage, HostGradients
from polyshard_offload.shards.host_storage import HostStorage
from polyshard_offload.shards.staging import StagingState
from polyshard_offload.shards.storage import TierStorage
from polyshard_offload.tiers.block_io import Calls
from polyshard_offload.tiers.host_memory import Arena
from polyshard_offload.tiers.io_pool import IOPool
from polyshard_offload.tiers.state_store import DiskStore, HostStore, Store
from polyshard_offload.tiers.swap_file import SwapFile

FileKind = Literal["parameters", "gradients", "optimizer state"]


@dataclass(eq=False)
class Resources:
    """Arenas by dtype, swap files by kind, and where the shards of all groups rest.

    ``staging`` is what gathers have on the device, ``step_staging`` what optimizers have opened.
    ``calls`` are the system calls that new files use.
    """

    settings: OffloadSettings
    staging: StagingState = field(default_factory=StagingState)
    step_staging: StagingState = field(default_factory=StagingState)
    arenas: dict[tuple[str, torch.dtype], Arena] = field(default_factory=dict)
    files: dict[FileKind, SwapFile] = field(default_factory=dict)
    storages: weakref.WeakSet[TierStorage] = field(default_factory=weakref.WeakSet)
    ranks: tuple[int, ...] = ()
    calls: Calls = field(default_factory=Calls)

    @functools.cached_property
    def pool(self) -> IOPool:
        """The threads of all files."""
        disk = self.settings.disk
        return IOPool(disk.io_threads, disk.block_bytes)

    def arena(self, kind: str, dtype: torch.dtype) -> Arena:
        """The arena for ``kind`` of content in ``dtype``."""
        return self.arenas.setdefault((kind, dtype), Arena(self.settings.pins))

    def file(self, kind: FileKind) -> SwapFile:
        """The swap file that holds ``kind``.

        Raises:
            StorageError: when it cannot be made.
        """
        if kind not in self.files:
            self.files[kind] = SwapFile(
                self.settings.disk, kind, global_rank(), self.calls, self.pool
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
        with Part(where):
            yield

    def storage(self, group: GroupInfo) -> TierStorage:
        """A place for the shard of ``group``."""
        settings, gradients = self.settings, self._gradients(group.orig_dtype)
        storage: TierStorage
        if settings.params == "disk":
            storage = DiskStorage(
                self.file("parameters"),
                group.device,
                self.staging,
                gradients,
                settings.prefetch,
                self.step_staging,
            )
        else:
            arena = self.arena("parameters", group.orig_dtype)
            storage = HostStorage(arena, group.device, self.staging, gradients)
        self.storages.add(storage)  # the group owns it, and takes it along when the model goes
        return storage

    def _gradients(self, dtype: torch.dtype) -> GradientStorage:
        if self.settings.grads == "disk":
            return DiskGradients(self.file("gradients"))
        return HostGradients(self.arena("gradients", dtype), self.staging)

    def state_store(self, tier: Tier) -> Store:
        """A store for the state of one optimizer."""
        if tier == "disk":
            return DiskStore(self.file("optimizer state"))
        return HostStore(self.arena("optimizer state", torch.uint8))

    def norm_of(self, parameter: Tensor) -> Tensor | None:
        """The 2-norm of the local part of a gradient that was moved, if it is unchanged since."""
        found = (storage.norms.of(parameter) for storage in self.storages)
        return next((norm for norm in found if norm is not None), None)

    def storage_of(self, parameter: Tensor) -> DiskStorage | None:
        """Where ``parameter`` rests, if that is a file."""
        address = local_of(parameter).data_ptr()
        for storage in self.storages:
            if isinstance(storage, DiskStorage) and storage.holds(address):
                return storage
        return None


class TierStorageFactory(StorageFactory):
    """Makes the storage of one group."""

    def __init__(self, resources: Resources, notices: Callable[[], tuple[str, ...]]) -> None:
        """``notices`` says what all tiers hold."""
        self._resources = resources
        self._all_notices = notices
        self._storage: weakref.ref[TierStorage] | None = None  # the group owns it

    @property
    @override
    def name(self) -> str:
        return self._resources.settings.params

    @property
    @override
    def settings(self) -> str:
        return f"gradients on {self._resources.settings.grads}"

    @property
    @override
    def notices(self) -> tuple[str, ...]:
        """Bytes of this group at rest, and those of all tiers."""
        storage = self._storage() if self._storage is not None else None
        if storage is None:
            return ()
        settings, nbytes = self._resources.settings, storage.shard_bytes
        return (
            f"offload: a shard of {nbytes:,} bytes on {settings.params}, its gradient of "
            f"{nbytes:,} bytes on {settings.grads}",
            *self._all_notices(),
        )

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> TierStorage:
        del layout
        storage = self._resources.storage(group)
        self._storage = weakref.ref(storage)
        return storage


def global_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
