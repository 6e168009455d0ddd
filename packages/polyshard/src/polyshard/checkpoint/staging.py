"""Copies on the host, so that training goes on while they are written.

[Note: stall of a save]
What training waits for is one copy of this rank's shards. The memory is kept for the next save:
fresh pages cost more than the copy. With an accelerator it is pinned and the copies are queued on
the current stream, so nothing waits here; the optimizer's next step comes after them on the stream,
and whoever reads the copies waits for the event.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor
from polyshard._torch.staged import with_local

_Path = tuple[object, ...]


class Staging:
    """Host memory for one save at a time. See [Note: stall of a save]."""

    def __init__(self) -> None:
        """Nothing is allocated before the first copy."""
        self._buffers: dict[_Path, Tensor] = {}
        self._used: set[_Path] = set()

    @torch.no_grad()
    def copy(self, tree: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """``tree`` on the host, and what waits until it is there.

        Args:
            tree: nested dicts of tensors and plain values.
        """
        self._used = set()
        copied: dict[str, Any] = self._copied((), tree)
        for path in self._buffers.keys() - self._used:
            del self._buffers[path]
        return copied, _waiter()

    def _copied(self, path: _Path, value: Any) -> Any:
        if isinstance(value, DTensor):
            return with_local(value, self._buffered(path, local_tensor(value)))
        if isinstance(value, Tensor):
            return self._buffered(path, value)
        if isinstance(value, Mapping):
            return {key: self._copied((*path, key), inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied((*path, i), inner) for i, inner in enumerate(value))
        return copy.deepcopy(value)

    def _buffered(self, path: _Path, tensor: Tensor) -> Tensor:
        self._used.add(path)
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(
                tensor.shape,
                dtype=tensor.dtype,
                pin_memory=tensor.device.type != "cpu",
                device="cpu",
            )
            self._buffers[path] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)


def _waiter() -> Callable[[], None]:
    if not torch.accelerator.is_available():
        return lambda: None
    event = torch.Event()
    event.record()
    return event.synchronize
