"""Gradients that wait for a later backward, and of which parameters there are any.

[Note: gradients that wait]
A gradient waits in one of three forms: *unsharded*, while ``set_requires_gradient_sync(False)``
keeps it from being reduced; as a *partial* sum over the shard axis, while
``set_requires_all_reduce(False)`` keeps it from being summed over replicas; and reduced, but *held*
on the device. All three belong to the group, not to what is bound to its memory, which is made anew
when parameters are converted or replaced in between.

What is held: moving gradients away from the device costs a transfer, and adding to them there
another. A storage with ``holds_gradients = True`` gets those of an iteration once: after the
backward that ``set_is_last_backward(True)`` announces. Sums are those ``.grad`` would hold, in its
dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Slot = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, stride and first element of a parameter's part of the shard."""


class Sums:
    """One sum over a whole shard, zero where no parameter has a gradient."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._present: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return self._total is not None

    @property
    def present(self) -> frozenset[int]:
        """Indices of the parameters that have a gradient."""
        return self._present

    def add(self, total: Tensor, present: Iterable[int]) -> None:
        """Add ``total`` (``[shard_numel]``, zero outside ``present``), and keep it."""
        if self._total is not None:
            total.add_(self._total.to(total.device))
        self._total = total
        self._present = self._present.union(present)

    def take(self) -> tuple[Tensor, list[int]]:
        """The sum, and the indices of the parameters that have one; nothing waits any more."""
        assert self._total is not None
        total, present = self._total, sorted(self._present)
        self.clear()
        return total, present

    def copy(self) -> Sums:
        """The same in memory of its own."""
        found = Sums()
        if self._total is not None:
            found.add(self._total.clone(), self._present)
        return found

    def convert(self, device: torch.device, dtype: torch.dtype) -> None:
        """Wait elsewhere, as parameters that were converted or moved do."""
        if self._total is not None:
            self._total = self._total.to(device, dtype)

    def clear(self) -> None:
        """Nothing waits any more."""
        self._total, self._present = None, frozenset()


@dataclass
class Accumulation:
    """What waits in a group. See [Note: gradients that wait]."""

    unsharded: dict[int, Tensor] = field(default_factory=dict)
    """By parameter index, in the dtype it adds up in, in memory that no other code holds."""
    partial: Sums = field(default_factory=Sums)
    held: Sums = field(default_factory=Sums)
    owned: dict[int, Tensor | None] = field(default_factory=dict)
    """Partial sums of what lands whole, by parameter index; ``None`` where others make the sum."""

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self.unsharded or self.held or self.awaits_replicas)

    @property
    def awaits_replicas(self) -> bool:
        """Whether there are sums that lack those of other replicas."""
        return bool(self.partial or self.owned)

    def convert(
        self,
        device: torch.device,
        kept: Sequence[torch.dtype | None],
        reduce: torch.dtype,
        orig: torch.dtype,
    ) -> None:
        """Follow parameters whose device or dtypes are others from now on."""
        for index, gradient in self.unsharded.items():
            self.unsharded[index] = gradient.to(device, kept[index] or gradient.dtype)
        self.partial.convert(device, reduce)
        self.held.convert(device, orig)
        for index, total in self.owned.items():
            self.owned[index] = None if total is None else total.to(device, reduce)

    def copy(self) -> Accumulation:
        """The same in memory of its own."""
        unsharded = {index: gradient.clone() for index, gradient in self.unsharded.items()}
        owned = {i: None if t is None else t.clone() for i, t in self.owned.items()}
        return Accumulation(unsharded, self.partial.copy(), self.held.copy(), owned)

    def take_over(self, other: Accumulation) -> None:
        """Have what ``other`` had, which is used no more."""
        self.unsharded.clear()  # the dict stays: others hold it
        self.unsharded.update(other.unsharded)
        self.partial, self.held, self.owned = other.partial, other.held, other.owned

    def clear(self) -> None:
        """Forget the gradients of a step that failed."""
        self.unsharded.clear()
        self.partial.clear()
        self.held.clear()
        self.owned.clear()


def part_of(total: Tensor, slot: Slot) -> Tensor:
    """One parameter's part of ``total`` (``[shard_numel]``), without what views check each time."""
    shape, stride, offset = slot
    return total.as_strided(shape, stride, total.storage_offset() + offset)


def blanks(numel: int, filled: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The half-open ranges of ``[0, numel)`` that no range of ``filled`` covers."""
    found, start = [], 0
    for begin, end in sorted(filled):
        if begin > start:
            found.append((start, begin))
        start = max(start, end)
    if start < numel:
        found.append((start, numel))
    return found
