"""Boxes of a tensor's elements, in pieces of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """A box of elements: where it begins and how large it is, in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """What to index a tensor with to get it."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


def split(block: Block, most_elements: int) -> Iterator[Block]:
    """Blocks of at most so many elements, in the order of their elements; none if it is empty."""
    if block.elements <= most_elements:
        if block.elements:
            yield block
        return
    dim = next(dim for dim, size in enumerate(block.sizes) if size > 1)
    half = block.sizes[dim] // 2
    for begin, size in ((0, half), (half, block.sizes[dim] - half)):
        offsets, sizes = list(block.offsets), list(block.sizes)
        offsets[dim] += begin
        sizes[dim] = size
        yield from split(Block(tuple(offsets), tuple(sizes)), most_elements)
