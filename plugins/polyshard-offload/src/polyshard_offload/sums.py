"""Checksums of parameters that rest on disk, as the last optimizer step left them.

[Note: who may write]
People write to parameters between steps: they load state dicts, average weights, clip. Such writes
go to the file through a window, where nothing notes them; version counters do. So a checksum counts
only as long as the parameter's counters are those of the step that left it, and parameters that no
optimizer has stepped have none. Writes through ``.data`` count nowhere and look like corruption.
"""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass

from torch import Tensor

from polyshard_offload._torch_private import local_of
from polyshard_offload.swap import bytes_of


@dataclass(frozen=True)
class Part:
    """One parameter within a shard: its place in elements, its counters, and what it held."""

    parameter: weakref.ref[Tensor]
    start: int
    numel: int
    versions: tuple[int, int]
    checksum: int


class PartSums:
    """The checksums of one shard. See [Note: who may write]."""

    def __init__(self) -> None:
        """Nothing is known of the shard."""
        self._parts: dict[int, Part] = {}

    def note(self, parameter: Tensor, start: int, values: Tensor) -> None:
        """A step left ``values`` (contiguous, on the host) from element ``start`` on."""
        self._parts[start] = Part(
            weakref.ref(parameter), start, values.numel(), _versions(parameter), _checksum(values)
        )

    def forget(self) -> None:
        """The shard was made anew."""
        self._parts.clear()

    def broken(self, shard: Tensor) -> int | None:
        """The first element of a parameter that ``shard`` (``[shard_numel]``) has changed."""
        for part in list(self._parts.values()):
            parameter = part.parameter()
            if parameter is None or _versions(parameter) != part.versions:
                del self._parts[part.start]
            elif _checksum(shard[part.start : part.start + part.numel]) != part.checksum:
                return part.start
        return None


def _versions(parameter: Tensor) -> tuple[int, int]:
    return parameter._version, local_of(parameter)._version


def _checksum(values: Tensor) -> int:
    return zlib.crc32(bytes_of(values.cpu()))
