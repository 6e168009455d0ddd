"""The optimizer state of one parameter as bytes: which tensors, where, and back again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from polyshard.memory.own_storage import own_storage
from polyshard.plugins.seams import like, local_of, spec_of
from polyshard_offload.tiers.state_store import Extent
from polyshard_optimizers.stepping import Stepper

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Entry:
    """One tensor of a record: local shape (elements), dtype, first byte, and its ``DTensor`` spec.

    The spec is ``None`` for a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    spec: object | None

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, part: Tensor) -> Tensor:
        """The local tensor over a record's bytes (``[nbytes]`` uint8)."""
        raw = part[self.start : self.start + self.nbytes]
        return raw.view(self.dtype).view(self.shape)


def entries_of(state: Mapping[str, Any]) -> tuple[Entry, ...]:
    """The tensors of a parameter's state that can move; counters and the like stay.

    What moves is dense, contiguous, and neither 0-dim nor empty on this rank. Tensors of other
    classes stay as well: what they hold (scales, say) is more than their bytes.
    """
    found: list[Entry] = []
    start = 0
    for name, value in state.items():
        if not _moves(value):
            continue
        local = local_of(value)
        entry = Entry(str(name), tuple(local.shape), local.dtype, start, spec_of(value))
        found.append(entry)
        start += -(-entry.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(found)


def _moves(value: object) -> bool:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return False
    local = local_of(value)
    if type(local) not in (Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
        return False
    return local.numel() > 0 and local.is_contiguous()


def record_bytes(entries: tuple[Entry, ...]) -> int:
    """Bytes that entries take together."""
    return entries[-1].start + entries[-1].nbytes if entries else 0


def dtype_bytes(entries: tuple[Entry, ...]) -> dict[torch.dtype, int]:
    """Bytes of each dtype among entries."""
    found: dict[torch.dtype, int] = {}
    for entry in entries:
        found[entry.dtype] = found.get(entry.dtype, 0) + entry.nbytes
    return found


@dataclass(frozen=True)
class Record:
    """Entries and where they are kept."""

    extent: Extent
    entries: tuple[Entry, ...]

    def views(self, part: Tensor) -> dict[str, Tensor]:
        """Every entry over a buffer that holds the record, as the optimizer knows it."""
        return {e.name: like(e.spec, e.view(part)) for e in self.entries}

    def windows(self, part: Tensor) -> dict[str, Tensor]:
        """The same over host memory, each tensor at the start of a storage of its own.

        ``copy.deepcopy`` of a ``DTensor`` whose local tensor has an offset fails in torch 2.13.
        """
        return {e.name: like(e.spec, own_storage(e.view(part))) for e in self.entries}


def largest_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the largest shard any rank has of ``parameter``; the same on all ranks."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                shape[placement.dim] = -(-shape[placement.dim] // parameter.device_mesh.size(axis))
    return tuple(shape)


def predict_entries(
    stepper: Stepper, group: Mapping[str, Any], parameter: Tensor, shape: tuple[int, ...]
) -> tuple[Entry, ...] | None:
    """What the first step makes for a shard of ``shape``, found with a step that has no values.

    Returns:
        The entries; ``None`` where the optimizer cannot step on the meta device.
    """
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return ()  # no gradient will ever come, so no state
    stand_in = torch.nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"))
    stand_in.grad = torch.empty_like(stand_in)
    state = stepper.twins.state_made(stand_in, group)
    if state is None:
        return None
    return tuple(_with_spec(entries_of(state), shape, spec_of(parameter)))


def _with_spec(
    entries: tuple[Entry, ...], shape: tuple[int, ...], spec: object | None
) -> Iterator[Entry]:
    for e in entries:
        yield Entry(e.name, e.shape, e.dtype, e.start, spec if e.shape == shape else None)
