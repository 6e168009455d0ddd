"""Parts of a tensor whose bytes lie row by row in a file, in pieces of bounded size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyshard_checkpoint.safetensors.header import Stored

BLOCK_BYTES = 16 << 20
"""The most that is between a tensor and its file at one time."""


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


def runs(block: Block, shape: Sequence[int]) -> tuple[int, Iterator[int]]:
    """How many elements lie together in a tensor of ``shape``, and where each such run begins."""
    whole = len(shape)
    while whole and block.sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(0, whole - 1)  # the dim that is cut is part of the run; those before it are not
    length = math.prod(block.sizes[outer:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = sum(o * s for o, s in zip(block.offsets[outer:], strides[outer:], strict=True))
    places = itertools.product(
        *(range(o, o + n) for o, n in zip(block.offsets[:outer], block.sizes[:outer], strict=True))
    )
    starts = (
        inner + sum(i * s for i, s in zip(place, strides[:outer], strict=True)) for place in places
    )
    return length, starts


def memory_of(content: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    plain: Any = content.flatten().view(torch.uint8).numpy()
    return memoryview(plain).cast("B")


def places(memory: memoryview, block: Block, stored: Stored) -> Iterator[tuple[memoryview, int]]:
    """Parts of a block's memory, and where their bytes are in the file."""
    size = stored.dtype.itemsize
    length, starts = runs(block, stored.shape)
    for index, start in enumerate(starts):
        begin = index * length * size
        yield memory[begin : begin + length * size], stored.begin + start * size
