"""Patches: what changed in a box of a tensor, as bytes, and how they are put in its place.

[Note: grains]
A patch lists *grains* of its box: runs of as many elements each, in the order of the box's elements
(row by row). Grains of one element are the sparse form, of a block's elements the form where only
digests of blocks are kept, and one grain as long as the box is all of it. So there is one form.

Positions of grains travel as the gaps between them, in digits of one or two bytes, whichever needs
less: a digit below the greatest ends a gap, the greatest says that it goes on. A gap is the sum of
its digits, so positions are the running sum at those that end one, and those of a box never take
more than a byte for each of its elements.

[Note: codes]
An element of two or four bytes that changes at a small learning rate mostly becomes a neighbouring
number. Where the old values are at hand, the difference of the bits, as integers, travels in one
byte: ``2 d`` for ``d >= 0``, ``-2 d - 1`` else, and 255 for a difference that needs more, whose
element travels as it is. So a change takes two bytes with its gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyshard_checkpoint.safetensors.blocks import memory_of
from polyshard_publish.blocks import Block
from polyshard_publish.digests import bits, block_digests
from polyshard_publish.errors import PublishError

ESCAPE = 255
"""The code of a difference that needs more than a byte."""
_DIGITS: Mapping[str, np.dtype[Any]] = {"u1": np.dtype("u1"), "u2": np.dtype("<u2")}


@dataclass(frozen=True)
class Patch:
    """Values for some elements of a box of a tensor.

    Attributes:
        name: of the receiver's tensor.
        block: the box.
        grain: elements in one run; the last one of the box may be shorter.
        digits: how the gaps between runs are written (``u1``, ``u2``).
        gaps: those gaps. See [Note: grains].
        values: of the elements of all runs (flat, on the host); if there are codes, of those only
            that have the greatest.
        codes: how elements differ from what was there (flat, uint8). See [Note: codes].
    """

    name: str
    block: Block
    grain: int
    digits: str
    gaps: bytes
    values: Tensor
    codes: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of gaps, codes and values."""
        return sum(len(one) for one in self.content())

    def content(self) -> list[memoryview]:
        """The bytes that :meth:`read` takes with the head."""
        codes = [] if self.codes is None else [memory_of(self.codes)]
        return [memoryview(self.gaps), *codes, memory_of(self.values)]

    @staticmethod
    def whole(name: str, block: Block, values: Tensor) -> Patch:
        """One with all of a box, which is not empty."""
        digits, gaps = write_gaps(np.zeros(1, dtype=np.int64))
        return Patch(name, block, block.elements, digits, gaps, values.flatten())

    def head(self) -> dict[str, Any]:
        """All but the bytes, as JSON can say it."""
        return {
            "name": self.name,
            "offsets": list(self.block.offsets),
            "sizes": list(self.block.sizes),
            "grain": self.grain,
            "digits": self.digits,
            "gap_bytes": len(self.gaps),
            "codes": 0 if self.codes is None else self.codes.numel(),
        }

    @staticmethod
    def read(head: dict[str, Any], content: memoryview, dtype: torch.dtype) -> Patch:
        """The patch of a head and the bytes of gaps and values, which are not copied.

        Raises:
            PublishError: when they are not those of a patch.
        """
        try:
            block = Block(tuple(map(int, head["offsets"])), tuple(map(int, head["sizes"])))
            split = int(head["gap_bytes"])
            gaps, rest = bytes(content[:split]), content[split:]
            count = int(head["codes"])
            codes = _tensor(rest[:count], torch.uint8) if count else None
            values = _tensor(rest[count:], dtype)
            found = Patch(
                str(head["name"]),
                block,
                int(head["grain"]),
                str(head["digits"]),
                gaps,
                values,
                codes,
            )
            escaped = values.numel() if codes is None else int((codes == ESCAPE).sum())
            given = values.numel() if codes is None else codes.numel()
            if (given, escaped) != (found.elements(), values.numel()) or given < max(1, count):
                raise ValueError(f"{given} values for {found.elements()} elements")
            if len(block.offsets) != len(block.sizes) or min(block.offsets, default=0) < 0:
                raise ValueError(f"a box at {block.offsets} with sizes {block.sizes}")
            return found
        except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
            raise PublishError(f"a patch that cannot be read: {error}") from error

    def starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where in the box each run begins."""
        found = read_gaps(self.digits, self.gaps) * self.grain
        if self.grain < 1 or (len(found) and not 0 <= found[-1] < self.block.elements):
            raise ValueError(f"runs of {self.grain} outside of {self.block.elements} elements")
        return found

    def elements(self) -> int:
        """How many get values."""
        starts = self.starts()
        if not len(starts):
            return 0
        last = min(self.grain, self.block.elements - int(starts[-1]))
        return (len(starts) - 1) * self.grain + last

    def swap(self, tensor: Tensor) -> Patch:
        """Put the values into a contiguous ``tensor``; return a patch that undoes it."""
        room = tensor[self.block.slices()]
        values = self.values.to(tensor.device)
        if self.grain >= self.block.elements:
            old = room.flatten().clone()
            room.copy_(values.view(room.shape))
            return self._with(old)
        places = self.places(tensor.shape).to(tensor.device)
        flat = tensor.view(-1)
        old = flat[places]
        flat[places] = values if self.codes is None else decoded(old, self.codes, values)
        return self._with(old)

    def places(self, shape: Sequence[int]) -> Tensor:
        """The elements that get values, as indices of the flat tensor (``[elements]`` int64)."""
        within = torch.from_numpy(self.starts())
        if self.grain > 1:
            within = (
                within.unsqueeze(1) + torch.arange(self.grain, device=within.device)
            ).flatten()
            within = within[within < self.block.elements]
        found, stride, rest = torch.zeros_like(within), 1, within
        for dim in reversed(range(len(shape))):
            size = self.block.sizes[dim]
            found += (rest % size + self.block.offsets[dim]) * stride
            rest = rest // size
            stride *= shape[dim]
        return found

    def _with(self, values: Tensor) -> Patch:
        return Patch(self.name, self.block, self.grain, self.digits, self.gaps, values)


def changed_elements(name: str, block: Block, old: Tensor, new: Tensor) -> Patch | None:
    """The patch that makes ``new`` of ``old``, the values of a box (flat); ``None`` if both agree.

    All of the box where that takes fewer bytes.
    """
    differ = bits(old) != bits(new)
    places = (differ.any(-1) if differ.ndim > 1 else differ).nonzero().flatten()
    codes, values = None, new[places]
    if new.element_size() in (2, 4):
        codes, values = coded(old[places], values)
    return _smaller(name, block, new, 1, places, values, codes)


def changed_blocks(
    name: str, block: Block, old: Tensor, new: Tensor, grain: int
) -> tuple[Patch | None, Tensor]:
    """The patch for blocks of ``new`` with other digests than ``old``, and all digests of ``new``.

    Args:
        name: of the receiver's tensor.
        block: the box that ``new`` is.
        old: digests of blocks of ``grain`` elements.
        new: values (flat).
        grain: elements a block.
    """
    found = block_digests(new, grain)
    positions = (found != old).nonzero().flatten()
    places = (positions.unsqueeze(1) * grain + torch.arange(grain, device=new.device)).flatten()
    values = new[places[places < new.numel()]]
    return _smaller(name, block, new, grain, positions, values, None), found


def _smaller(
    name: str,
    block: Block,
    new: Tensor,
    grain: int,
    positions: Tensor,
    values: Tensor,
    codes: Tensor | None,
) -> Patch | None:
    if not positions.numel():
        return None
    digits, gaps = write_gaps(positions.cpu().numpy())
    found = Patch(
        name, block, grain, digits, gaps, values.cpu(), None if codes is None else codes.cpu()
    )
    return found if found.nbytes < new.nbytes else Patch.whole(name, block, new.cpu())


def coded(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the differences of flat tensors, and elements of ``new`` that need more."""
    difference = bits(new).to(torch.int64) - bits(old)
    codes = torch.where(difference >= 0, 2 * difference, -2 * difference - 1).clamp_(max=ESCAPE)
    return codes.to(torch.uint8), new[codes == ESCAPE]


def decoded(old: Tensor, codes: Tensor, values: Tensor) -> Tensor:
    """What :func:`coded` was given as ``new``."""
    code = codes.to(old.device, torch.int64)
    difference = torch.where(code % 2 == 0, code // 2, -(code + 1) // 2)
    new = bits(old).to(torch.int64) + difference
    new[code == ESCAPE] = bits(values).to(torch.int64)
    return new.to(bits(old).dtype).view(old.dtype)


def _tensor(content: memoryview, dtype: torch.dtype) -> Tensor:
    if not len(content):
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=dtype)


def write_gaps(positions: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[str, bytes]:
    """Sorted positions as digits and bytes. See [Note: grains]."""
    gaps = np.diff(positions, prepend=0)
    best = min(_DIGITS, key=lambda one: int((gaps // _most(one)).sum() + len(gaps)) * int(one[1]))
    most = _most(best)
    ends = np.cumsum(gaps // most + 1) - 1
    written = np.full(int(ends[-1]) + 1 if len(ends) else 0, most, dtype=_DIGITS[best])
    written[ends] = gaps % most
    return best, written.tobytes()


def read_gaps(digits: str, content: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions from digits and bytes.

    Raises:
        ValueError: when a gap has no end, or two positions are one.
    """
    if digits not in _DIGITS:
        raise ValueError(f"digits {digits!r}")
    written = np.frombuffer(content, dtype=_DIGITS[digits]).astype(np.int64)
    ends = written != _most(digits)
    if len(ends) and not ends[-1]:
        raise ValueError("the last gap has no end")
    found: np.ndarray[Any, np.dtype[np.int64]] = np.cumsum(written)[ends]
    if len(found) > 1 and int(np.diff(found).min()) < 1:
        raise ValueError("a position comes twice")
    return found


def _most(digits: str) -> int:
    return int(256 ** _DIGITS[digits].itemsize - 1)
