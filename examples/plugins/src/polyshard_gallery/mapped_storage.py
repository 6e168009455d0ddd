"""Keep shards in memory-mapped files: the system may write them out when memory is short."""

import tempfile
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyshard import Plugin, ShardStorage, StorageFactory, hookimpl
from polyshard.plugins.seams import GroupInfo, GroupLayout


class MappedShard(ShardStorage):
    """Optimizers work on the mapped file; a gather reads a copy that lasts as long as it."""

    def __init__(self, folder: str, device: torch.device) -> None:
        self._folder, self._device = folder, device

    def rest(self, shard: Tensor) -> Tensor:
        self._resting = self._near = shard
        if shard.is_meta or not shard.numel():  # nothing to keep (yet)
            return shard
        # A name that nobody can guess, gone at once: the mapping alone keeps the file.
        with tempfile.NamedTemporaryFile(dir=self._folder or None) as file:
            file.truncate(shard.nbytes)
            numel, dtype = shard.numel(), shard.dtype
            self._resting = torch.from_file(file.name, shared=True, size=numel, dtype=dtype)
        self._resting.copy_(shard)
        self._near = torch.empty_like(shard, device=self._device)
        return self._resting

    def view(self) -> Tensor:
        if self._near is not self._resting:  # views can be made of memory only
            self._near.untyped_storage().resize_(self._resting.nbytes)
        return self._near

    def fetch(self) -> None:
        if self._near is not self._resting:
            self.view().copy_(self._resting)

    def release(self) -> None:
        if self._near is not self._resting:
            self._near.untyped_storage().resize_(0)

    def place_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.to(self._resting.device)


@dataclass(frozen=True, eq=False)
class MappedStorage(Plugin, StorageFactory):
    """Shards of every group rest in files of ``folder``, the system's temporary one by default."""

    name = "mapped_storage"
    folder: str = field(default="", repr=False)  # left out of the settings: ranks may differ

    @hookimpl
    def polyshard_shard_storage(self) -> StorageFactory:
        """The plugin is its own factory."""
        return self

    def bind(self, group: GroupInfo, layout: GroupLayout) -> MappedShard:
        return MappedShard(self.folder, group.device)
