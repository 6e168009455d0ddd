"""Checksums of parameters that rest on disk, as the last step or the last reader left them.

After the user wrote to parameters, :class:`.private_window.PrivateWindow` says which checksums
still count: see [Note: who may write] there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyshard.plugins.seams import local_of
from polyshard_offload.tiers.host_memory import checksum


class ParameterChecksums:
    """The checksums of the parameters of one shard."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._held: list[tuple[int, int]] = []

    def hold(self, parameters: Sequence[Tensor], shard: Tensor, values: Tensor | None) -> None:
        """``parameters`` are parts of ``shard``, a window; ``values`` is what it should hold."""
        self._known.clear()
        self._held.clear()
        for parameter in parameters:
            local = local_of(parameter)
            if not local.numel() or local.is_meta:
                continue
            start = (local.data_ptr() - shard.data_ptr()) // local.itemsize
            self._held.append((start, local.numel()))
            if values is not None:
                self.note(start, values[start : start + local.numel()])

    def note(self, start: int, values: Tensor) -> None:
        """``values`` (contiguous, on the host) is what is right from element ``start`` on."""
        self._known[start] = checksum(values)

    def forget(self, first: int, last: int) -> None:
        """The user wrote to elements from ``first`` up to ``last`` (which is not one of them)."""
        for start, numel in self._held:
            if start < last and first < start + numel:
                self._known.pop(start, None)

    def broken(self, shard: Tensor) -> int | None:
        """The first element of a parameter that ``shard`` (``[shard_numel]``) has changed.

        What nothing is known of is right as it is found now.
        """
        for start, numel in self._held:
            found = shard[start : start + numel]
            if start not in self._known:
                self.note(start, found)
            elif checksum(found) != self._known[start]:
                return start
        return None
