"""``record_stream`` on tensors that have a storage of their own over memory of another storage.

[Note: recorded streams]
A caching allocator finds a block by the storage that it made. Sharded parameters and gradients have
storages of their own over parts of such a block (see [Note: own storage] of memory.own_storage);
the allocator does not know these, and its ``record_stream`` ignores them without an error. So the
operator gets a kernel that runs before the backend's and hands the block's own storage on. Its
dispatch key is ``BackendSelect``, which unlike autograd's is also used in inference mode.

Storages are held weakly, by the address of their memory; those that are freed are dropped.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_KEY = torch._C.DispatchKey.BackendSelect


def owns_memory(memory: Tensor) -> None:
    """Note that other storages lie over parts of ``memory``, whose storage the allocator made."""
    if memory.device.type not in {"cpu", "meta"}:
        _owners().add(memory.untyped_storage())


class Owners:
    """Storages by where their memory begins."""

    def __init__(self) -> None:
        self._found: dict[tuple[torch.device, int], tuple[int, StorageWeakRef]] = {}
        self._limit = 64

    def add(self, storage: torch.UntypedStorage) -> None:
        """Find ``storage`` from now on, as long as anything else holds it."""
        start = storage.data_ptr()
        self._found[storage.device, start] = (start + storage.nbytes(), StorageWeakRef(storage))
        if len(self._found) > self._limit:
            self._found = {k: v for k, v in self._found.items() if not v[1].expired()}
            self._limit = max(64, 2 * len(self._found))

    def of(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """The storage that ``tensor`` lies in, or None if it was not added."""
        address, device = tensor.data_ptr(), tensor.device
        for (where, start), (stop, known) in self._found.items():
            if start <= address < stop and where == device:
                storage: Any = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
                if storage is not None:
                    found: torch.UntypedStorage = storage
                    return found
        return None


@functools.cache
def _owners() -> Owners:
    """The owners of this process; the first call registers the kernel."""
    owners = Owners()
    operator = torch.ops.aten.record_stream.default
    below = torch._C._dispatch_keyset_full_after(_KEY)

    def record_stream(keys: torch._C.DispatchKeySet, tensor: Tensor, stream: Any) -> None:
        owner = owners.of(tensor)
        if owner is not None:
            tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(owner)
        operator.redispatch(keys & below, tensor, stream)

    library = torch.library.Library("aten", "IMPL")
    library.impl("record_stream", record_stream, _KEY.name, with_keyset=True)
    _owners.library = library  # type: ignore[attr-defined]
    return owners
