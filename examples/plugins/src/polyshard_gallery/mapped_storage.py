"""Keep shards in memory-mapped files: the system may write them out when memory is short."""

import tempfile
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyshard import StoragePlugin


@dataclass(frozen=True, eq=False)
class MappedStorage(StoragePlugin):
    """Shards rest in files of ``folder``, the system's temporary one by default.

    Optimizers work on the mapped file; a gather reads a copy that lasts as long as it.
    """

    name = "mapped_storage"
    folder: str = field(default="", repr=False)  # left out of the settings: ranks may differ

    def rest(self, shard: Tensor) -> Tensor:
        self.resting = self.near = shard
        if shard.is_meta or not shard.numel():  # nothing to keep (yet)
            return shard
        # A name that cannot be guessed, gone at once: the mapping alone keeps the file.
        with tempfile.NamedTemporaryFile(dir=self.folder or None) as file:
            file.truncate(shard.nbytes)
            numel, dtype = shard.numel(), shard.dtype
            self.resting = torch.from_file(file.name, shared=True, size=numel, dtype=dtype)
        self.resting.copy_(shard)
        self.near = torch.empty_like(shard, device=self.group.device)
        return self.resting

    def view(self) -> Tensor:
        if self.near is not self.resting:  # views can be made of memory only
            self.near.untyped_storage().resize_(self.resting.nbytes)
        return self.near

    def fetch(self) -> None:
        if self.near is not self.resting:
            self.view().copy_(self.resting)

    def release(self) -> None:
        if self.near is not self.resting:
            self.near.untyped_storage().resize_(0)

    def place_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.to(self.resting.device)
