"""Tensors that share memory and nothing else.

[Note: own storage]
A sharded parameter is a part of its group's shard buffer. As a view it would have the buffer's
storage, and torch saves, copies and shares whole storages: one parameter would carry its group
along, and a ``DTensor`` that does not begin where its storage does cannot be saved at all. So its
local tensor begins a storage of its own size over the buffer's memory, made through DLPack: that
works on every device, and the storage keeps the memory alive without a Python object in between.
Such a tensor has a version counter of its own, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from polyshard._torch.private import storage_holders
from polyshard._torch.record_stream import owns_memory


def own_storage(part: Tensor) -> Tensor:
    """``part`` (contiguous) at the start of a storage of its own. See [Note: own storage]."""
    if part.is_meta or not part.numel():
        return torch.empty(part.shape, dtype=part.dtype, device=part.device)
    owns_memory(part)
    raw = part.view(-1).view(torch.uint8)  # DLPack does not know every dtype
    storage = from_dlpack(to_dlpack(raw)).untyped_storage()
    alone = torch.empty(0, dtype=part.dtype, device=part.device)
    return alone.set_(storage, 0, part.shape, part.stride())


def own_storage_of_gradient(part: Tensor) -> Tensor:
    """As :func:`own_storage`, quicker, and with a version counter that begins at 0.

    The caller names the owner of the memory once for all parts (``owns_memory``).
    """
    if not part.numel():
        return torch.empty(part.shape, dtype=part.dtype, device=part.device)
    alone = from_dlpack(to_dlpack(part))
    if 1 not in part.shape:
        return alone
    # DLPack forgets the strides of dims of size 1, by which optimizers tell that tensors are alike.
    # Detached, because a view keeps its base, which would count as a holder of the memory.
    return alone.as_strided(part.shape, part.stride()).detach()


@dataclass(frozen=True)
class Home:
    """Where a parameter rests: an alias of its memory that no parameter uses itself.

    A storage keeps its tensors when it moves to memory that processes share, which leaves the
    address behind.
    """

    alias: Tensor
    address: int

    @classmethod
    def at(cls, alias: Tensor) -> Home:
        """Where ``alias`` is now."""
        return cls(alias, alias.data_ptr())

    @property
    def was_shared(self) -> bool:
        """Whether the storage got other memory."""
        return self.alias.data_ptr() != self.address

    def holds(self, local: Tensor) -> bool:
        """Whether ``local`` is still of this storage, which got other memory."""
        return self.was_shared and local.data_ptr() == self.alias.data_ptr()

    @property
    def holders(self) -> int:
        """How many tensors look into the memory, the parameter's own included."""
        return storage_holders(self.alias) - 1 if self.alias.numel() else 0
