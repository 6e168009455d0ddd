"""Copies of values that may change, in memory that is used again.

[Note: copies of an attempt]
Copies rest on the host, pinned beside an accelerator: an attempt is there for when a device runs
out of memory. They are queued on the current stream, before whatever changes their originals and
after whatever was to read them, so the host waits for none of them. Fresh pages cost more than the
copy, so memory is kept for the next attempt.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor
from polyshard._torch.staged import with_local


class Memory:
    """Host memory for the tensors of one place, taken up again by those of the next time."""

    def __init__(self) -> None:
        """Nothing is allocated before something is to be held."""
        self._buffers: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """What is kept."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def hold(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A copy of each."""
        del self._buffers[len(tensors) :]
        for index, tensor in enumerate(tensors):
            if index == len(self._buffers):
                self._buffers.append(_room(tensor))
            elif not _fits(self._buffers[index], tensor):
                self._buffers[index] = _room(tensor)
        if tensors:
            torch._foreach_copy_(self._buffers, list(tensors), non_blocking=True)
        return list(self._buffers)


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu", device="cpu"
    )


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    is_pinned = buffer.is_pinned() if tensor.device.type != "cpu" else True
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype and is_pinned


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in a tree of kept values."""

    index: int


class Kept:
    """Trees of values as they were, tensors included."""

    def __init__(self, memory: Memory) -> None:
        """``memory`` is for this object alone until the next one takes it over."""
        self._memory = memory
        self._live: list[Tensor] = []
        self._places: dict[int, _Place] = {}
        self._copies: list[Tensor] = []

    def add(self, tree: Any) -> Any:
        """What :meth:`as_it_was` and :meth:`afresh` take; nothing is copied before :meth:`take`."""
        if isinstance(tree, Tensor):
            place = self._places.get(id(tree))
            if place is None:
                place = self._places[id(tree)] = _Place(len(self._live))
                self._live.append(tree)
            return place
        if isinstance(tree, Mapping):
            return _like(tree, {key: self.add(value) for key, value in tree.items()})
        if type(tree) in (list, tuple):
            return type(tree)(self.add(value) for value in tree)
        return copy.deepcopy(tree)

    @torch.no_grad()
    def take(self) -> None:
        """Copy everything that was added."""
        self._copies = self._memory.hold([_local(tensor) for tensor in self._live])

    @torch.no_grad()
    def put_back(self) -> None:
        """Write the values of all tensors back into them."""
        if self._live:
            torch._foreach_copy_([_local(t) for t in self._live], self._copies, non_blocking=True)

    def as_it_was(self, kept: Any) -> Any:
        """The tree that was added, made of the same tensor objects."""
        return self._made(kept, lambda index: self._live[index])

    def afresh(self, kept: Any) -> Any:
        """The tree that was added, with the values it had then, in tensors of their own."""
        return self._made(kept, self._clone)

    def _clone(self, index: int) -> Tensor:
        live, values = self._live[index], self._copies[index]
        values = values.to(_local(live).device, copy=True)
        return with_local(live, values) if isinstance(live, DTensor) else values

    def _made(self, kept: Any, tensor: Callable[[int], Tensor]) -> Any:
        if isinstance(kept, _Place):
            return tensor(kept.index)
        if isinstance(kept, dict):
            return _like(kept, {key: self._made(v, tensor) for key, v in kept.items()})
        if type(kept) in (list, tuple):
            return type(kept)(self._made(value, tensor) for value in kept)
        return copy.deepcopy(kept)


def _like(tree: Mapping[Any, Any], content: dict[Any, Any]) -> dict[Any, Any]:
    """``content`` as a mapping of the kind of ``tree``, where that is one of Python's own."""
    made: dict[Any, Any] = {}
    if isinstance(tree, defaultdict):
        made = defaultdict(tree.default_factory)
    elif type(tree) in (OrderedDict, Counter):
        made = cast("dict[Any, Any]", type(tree)())
    made.update(content)
    if isinstance(made, OrderedDict) and hasattr(tree, "_metadata"):  # of a module's state dict
        made._metadata = copy.copy(tree._metadata)  # type: ignore[attr-defined]
    return made


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
