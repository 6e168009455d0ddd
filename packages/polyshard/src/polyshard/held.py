"""Sharded gradients that wait on the device for the last backward of an iteration."""

from __future__ import annotations

import torch
from torch import Tensor

Slot = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, stride and first element of a parameter's part of the shard."""


class HeldGradients:
    """Sharded gradients of backwards that are not the last, added up where they were reduced.

    [Note: held gradients]
    Moving gradients away from the device costs a transfer, and adding to them there another. A
    storage with ``holds_gradients = True`` gets those of an iteration once: after the backward that
    ``set_is_last_backward(True)`` announces. Sums are those ``.grad`` would hold, in its dtype.
    """

    def __init__(self) -> None:
        """Nothing is held."""
        self._total: Tensor | None = None
        self._slots: dict[int, Slot] = {}

    def __bool__(self) -> bool:
        """Whether something is."""
        return self._total is not None

    def add(self, total: Tensor, slots: dict[int, Slot]) -> None:
        """Add the gradients in ``total`` (``[shard_numel]``) of the parameters in ``slots``."""
        if self._total is None:
            self._total, self._slots = total, dict(slots)
            return
        for index, slot in slots.items():
            held, new = part_of(self._total, slot), part_of(total, slot)
            if index in self._slots:
                held.add_(new)
            else:  # what is there is no gradient
                held.copy_(new)
        self._slots.update(slots)

    def to(self, device: torch.device, dtype: torch.dtype) -> HeldGradients:
        """The same sums elsewhere; ``self`` is not used any more."""
        if self._total is not None:
            self._total = self._total.to(device, dtype)
        return self

    def take(self) -> tuple[Tensor, list[int]]:
        """The sums, and the indices of the parameters that have one; nothing is held any more."""
        assert self._total is not None
        total, present = self._total, sorted(self._slots)
        self._total, self._slots = None, {}
        return total, present


def part_of(total: Tensor, slot: Slot) -> Tensor:
    """One parameter's part of ``total`` (``[shard_numel]``), without what views check each time."""
    shape, stride, offset = slot
    return total.as_strided(shape, stride, total.storage_offset() + offset)
