"""Patches: what changed in a box of a tensor, as bytes, and how they are put in its place.

[Note: grains]
A patch lists *grains* of its box: runs of as many elements each, in the order of the box's elements
(row by row). Grains of one element are the sparse form, of a block's elements the form where only
digests of blocks are kept, and one grain as long as the box is all of it. So there is one form.

Positions of grains travel as the gaps between them, in bytes: one below 255 ends a gap, 255 says
that it continues. A gap is the sum of its bytes, so positions are the running sum at those that end
one, and those of a box never take more than a byte for each of its elements.

[Note: codes]
An element that changes at a small learning rate mostly becomes a neighbouring number. Where the old
values are at hand, the difference of the bits, as integers of the element's size that wrap around,
travels in one byte: ``2 d`` for ``d >= 0``, ``-2 d - 1`` else, and 255 for a difference that needs
more, whose element travels as it is. So a change takes two bytes with its gap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyshard_checkpoint.safetensors.blocks import memory_of
from polyshard_publish.blocks import Block
from polyshard_publish.digests import bits, block_digests
from polyshard_publish.errors import PublishError

LAST = 255
"""The byte of a gap that continues, and the code of a difference that needs more than a byte."""


@dataclass(frozen=True)
class Patch:
    """Values for some elements of a box of a tensor."""

    name: str  # of the receiver's tensor
    block: Block  # the box
    grain: int  # elements in one run; the last one of the box may be shorter
    gaps: bytes  # between runs
    values: Tensor  # flat, on the host; if there are codes, of elements with the greatest only
    codes: Tensor | None = None  # how elements differ from what was there (flat, uint8)

    @staticmethod
    def whole(name: str, block: Block, values: Tensor) -> Patch:
        """One with all of a box, which is not empty."""
        return Patch(name, block, block.elements, b"\0", values.flatten().cpu())

    @property
    def nbytes(self) -> int:
        """Of gaps, codes and values."""
        return sum(len(one) for one in self.content())

    def content(self) -> list[memoryview]:
        """The bytes that :meth:`read` takes with the head."""
        codes = [] if self.codes is None else [memory_of(self.codes)]
        return [memoryview(self.gaps), *codes, memory_of(self.values)]

    def head(self) -> dict[str, Any]:
        """All but the bytes, as JSON can say it."""
        return {
            "name": self.name,
            "offsets": list(self.block.offsets),
            "sizes": list(self.block.sizes),
            "grain": self.grain,
            "gap_bytes": len(self.gaps),
            "codes": 0 if self.codes is None else self.codes.numel(),
        }

    @staticmethod
    def read(head: dict[str, Any], content: memoryview, dtype: torch.dtype) -> Patch:
        """The patch of a head and its bytes; a :class:`PublishError` when they are none."""
        try:
            block = Block(tuple(map(int, head["offsets"])), tuple(map(int, head["sizes"])))
            end = int(head["gap_bytes"])
            gaps, rest, count = bytes(content[:end]), content[end:], int(head["codes"])
            codes = _tensor(rest[:count], torch.uint8) if count else None
            values = _tensor(rest[count:], dtype)
            found = Patch(str(head["name"]), block, int(head["grain"]), gaps, values, codes)
            escaped = values.numel() if codes is None else int((codes == LAST).sum())
            given = values.numel() if codes is None else codes.numel()
            if (given, escaped) != (found.elements(), values.numel()) or given < max(1, count):
                raise ValueError(f"{given} values for {found.elements()} elements")
            if len(block.offsets) != len(block.sizes) or min(block.offsets, default=0) < 0:
                raise ValueError(f"a box at {block.offsets} with sizes {block.sizes}")
            return found
        except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
            raise PublishError(f"a patch that cannot be read: {error}") from error

    def elements(self) -> int:
        """How many get values."""
        starts = self._starts()
        if not len(starts):
            return 0
        last = min(self.grain, self.block.elements - int(starts[-1]))
        return (len(starts) - 1) * self.grain + last

    def swap(self, tensor: Tensor) -> Patch:
        """Put the values into a contiguous ``tensor``; return a patch that undoes it."""
        room = tensor[self.block.slices()]
        flat = bits(room.contiguous()).view(-1)  # the same memory, or a copy of the box
        values = bits(self.values).to(tensor.device)
        if self.codes is None and self.grain >= self.block.elements:
            old = flat.clone()
            flat.copy_(values)
        else:
            places = self._places().to(tensor.device)
            old = flat.index_select(0, places)
            new = values if self.codes is None else decoded(old, self.codes, values)
            flat.scatter_(0, places, new)
        if not room.is_contiguous():
            room.copy_(flat.view(tensor.dtype).view(room.shape))
        return replace(self, values=old.view(tensor.dtype), codes=None)

    def _starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where in the box each run begins."""
        found = read_gaps(self.gaps) * self.grain
        if self.grain < 1 or (len(found) and not 0 <= found[-1] < self.block.elements):
            raise ValueError(f"runs of {self.grain} outside of {self.block.elements} elements")
        return found

    def _places(self) -> Tensor:
        """The elements that get values, as indices of the flat box (``[elements]`` int64)."""
        starts = torch.from_numpy(self._starts())
        if self.grain == 1:
            return starts
        within = torch.arange(self.grain, device=starts.device)
        found = (starts.unsqueeze(1) + within).flatten()
        return found[found < self.block.elements]


def changed_elements(name: str, block: Block, old: Tensor, new: Tensor) -> Patch | None:
    """The patch that makes ``new`` of ``old``, values of a box (flat); ``None`` if both agree."""
    difference = bits(new) - bits(old)
    places = difference.nonzero().flatten()
    if new.element_size() == 1:
        return _smaller(name, block, new, 1, places, places)
    codes = coded(difference.index_select(0, places))
    return _smaller(name, block, new, 1, places, places[codes == LAST], codes.cpu())


def changed_blocks(
    name: str, block: Block, old: Tensor, new: Tensor, grain: int
) -> tuple[Patch | None, Tensor]:
    """The patch for blocks of ``new`` whose digests are not ``old``, and the digests of all."""
    found = block_digests(new, grain)
    positions = (found != old).nonzero().flatten()
    places = (positions.unsqueeze(1) * grain + torch.arange(grain, device=new.device)).flatten()
    return _smaller(name, block, new, grain, positions, places[places < new.numel()]), found


def _smaller(
    name: str,
    block: Block,
    new: Tensor,
    grain: int,
    runs: Tensor,
    places: Tensor,
    codes: Tensor | None = None,
) -> Patch | None:
    """The patch with the values of ``places``; all of the box where that takes fewer bytes."""
    if not runs.numel():
        return None
    values = bits(new)[places].view(new.dtype).cpu()
    found = Patch(name, block, grain, write_gaps(runs.cpu().numpy()), values, codes)
    return found if found.nbytes < new.nbytes else Patch.whole(name, block, new)


def coded(difference: Tensor) -> Tensor:
    """Codes (uint8) of differences; ``LAST`` for those that need more."""
    is_near = (difference >= -127) & (difference <= 127)
    signs = difference >> (8 * difference.element_size() - 1)
    return torch.where(is_near, (difference << 1) ^ signs, LAST).to(torch.uint8)


def decoded(old: Tensor, codes: Tensor, values: Tensor) -> Tensor:
    """What the bits in ``old`` become; ``values`` are of those whose difference needs more."""
    code = codes.to(old.device, old.dtype)
    new = old + ((code >> 1) ^ -(code & 1))
    new[code == LAST] = values
    return new


def _tensor(content: memoryview, dtype: torch.dtype) -> Tensor:
    if not len(content):
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=dtype)


def write_gaps(positions: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
    """Sorted positions as bytes. See [Note: grains]."""
    more, rest = np.divmod(np.diff(positions, prepend=0), LAST)
    ends = np.cumsum(more + 1) - 1
    written = np.full(int(ends[-1]) + 1 if len(ends) else 0, LAST, dtype=np.uint8)
    written[ends] = rest
    return written.tobytes()


def read_gaps(gaps: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions from bytes; a ``ValueError`` when a gap has no end, or two positions are one."""
    written = np.frombuffer(gaps, dtype=np.uint8)
    ends = written != LAST
    if len(ends) and not ends[-1]:
        raise ValueError("the last gap has no end")
    found: np.ndarray[Any, np.dtype[np.int64]] = np.cumsum(written, dtype=np.int64)[ends]
    if len(found) > 1 and int(np.diff(found).min()) < 1:
        raise ValueError("a position comes twice")
    return found
