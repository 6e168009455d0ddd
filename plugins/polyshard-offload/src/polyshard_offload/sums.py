"""Checksums of parameters that rest on disk, as the last step or the last reader left them.

[Note: who may write]
People write to parameters between steps: they load state dicts, average weights, clip. Such writes
go to the file through a window, where nothing notes them; version counters do. So a checksum counts
only as long as the parameter's counters are those of the moment it was taken: when the shard was
made, when a step left it, or when it was first read after somebody wrote to it. Writes through
``.data`` count nowhere and look like corruption.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from polyshard_offload._torch_private import local_of
from polyshard_offload.memory import bytes_of


@dataclass(frozen=True)
class Part:
    """One parameter within a shard: its counters, and the checksum of what it held then."""

    versions: tuple[int, int]
    checksum: int


class PartSums:
    """The checksums of one shard. See [Note: who may write]."""

    def __init__(self) -> None:
        """Nothing is known of the shard."""
        self._parts: dict[int, Part] = {}
        self._held: list[tuple[Tensor, int, int]] = []

    def hold(self, parameters: Sequence[Tensor], shard: Tensor, values: Tensor | None) -> None:
        """``parameters`` are parts of ``shard``, a window; ``values`` is what it should hold."""
        self._parts.clear()
        self._held.clear()
        for parameter in parameters:
            local = local_of(parameter)
            if not local.numel() or local.is_meta:
                continue
            start = (local.data_ptr() - shard.data_ptr()) // local.itemsize
            self._held.append((parameter, start, local.numel()))
            if values is not None:
                self.note(parameter, start, values[start : start + local.numel()])

    def note(self, parameter: Tensor, start: int, values: Tensor) -> None:
        """``values`` (contiguous, on the host) is what is right from element ``start`` on."""
        self._parts[start] = Part(_versions(parameter), _checksum(values))

    def broken(self, shard: Tensor) -> int | None:
        """The first element of a parameter that ``shard`` (``[shard_numel]``) has changed."""
        for parameter, start, numel in self._held:
            known, found = self._parts.get(start), shard[start : start + numel]
            if known is None or known.versions != _versions(parameter):
                self.note(parameter, start, found)
            elif _checksum(found) != known.checksum:
                return start
        return None


def _versions(parameter: Tensor) -> tuple[int, int]:
    return parameter._version, local_of(parameter)._version


def _checksum(values: Tensor) -> int:
    return zlib.crc32(bytes_of(values.cpu()))
