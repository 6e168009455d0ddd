"""Where blocks lie: pure arithmetic, no tensors.

A parameter's chunk is a matrix of *rows*: a row is everything behind the sharded dim, which no
layout ever cuts. A row of ``n`` values is cut into the fewest blocks the format allows, equal but
for the last. That makes at most two *tiles* a parameter, regular arrays of equal blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from polyshard_quantized.formats.base import BlockFormat

VECTOR_ELEMENTS = 16
"""Blocks of whole vectors are three times as fast to reduce as blocks of 63 values, say."""


@dataclass(frozen=True)
class Tile:
    """``rows x columns`` blocks of ``block_elements`` values each.

    Offsets and strides say where the first block lies and how far the next row is: of values in
    elements, of codes in bytes, of scales in scales. Blocks of one row follow each other.
    """

    rows: int
    columns: int
    block_elements: int
    code_bytes: int
    value_offset: int
    value_stride: int
    code_offset: int
    code_stride: int
    scale_offset: int
    scale_stride: int

    @property
    def row_elements(self) -> int:
        """Values of one row of the tile."""
        return self.columns * self.block_elements

    @property
    def elements(self) -> int:
        """How many values all blocks hold."""
        return self.rows * self.row_elements

    def moved(self, values: int) -> Tile:
        """The tile where values start ``values`` elements later."""
        return replace(self, value_offset=self.value_offset + values)

    def continues(self, other: Tile) -> bool:
        """Whether this tile starts where ``other`` ends, in every respect, with equal blocks."""
        mine = (self.value_offset, self.code_offset, self.scale_offset)
        ends = (
            other.value_offset + other.rows * other.value_stride,
            other.code_offset + other.rows * other.code_stride,
            other.scale_offset + other.rows * other.scale_stride,
        )
        shape = (self.columns, self.block_elements, self.code_bytes)
        strides = (self.value_stride, self.code_stride, self.scale_stride)
        return (
            mine == ends
            and shape == (other.columns, other.block_elements, other.code_bytes)
            and strides == (other.value_stride, other.code_stride, other.scale_stride)
        )


@functools.lru_cache(maxsize=4096)  # reductions ask the same every step
def split(tile: Tile, elements: int) -> tuple[Tile, ...]:
    """Tiles of about ``elements`` values each (at least one row), in order."""
    step = max(1, elements // tile.row_elements)
    return tuple(
        replace(
            tile,
            rows=min(step, tile.rows - start),
            value_offset=tile.value_offset + start * tile.value_stride,
            code_offset=tile.code_offset + start * tile.code_stride,
            scale_offset=tile.scale_offset + start * tile.scale_stride,
        )
        for start in range(0, tile.rows, step)
    )


@dataclass(frozen=True)
class RowBlocks:
    """How a format cuts rows of ``row_elements`` values."""

    row_elements: int
    format: BlockFormat

    @property
    def count(self) -> int:
        """How many blocks a row is cut into."""
        return -(-self.row_elements // self.format.block_elements)

    @property
    def block_elements(self) -> int:
        """Values of every block but the last: equal ones, or else vectors of 16."""
        least = -(-self.row_elements // self.count)
        if self.row_elements % self.count == 0:
            return least
        whole = -(-least // VECTOR_ELEMENTS) * VECTOR_ELEMENTS
        return min(whole, self.format.block_elements, self.row_elements)

    @property
    def tail_elements(self) -> int:
        """Values of the last block."""
        return self.row_elements - (self.count - 1) * self.block_elements

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a row."""
        whole = (self.count - 1) * self.format.code_bytes(self.block_elements)
        return whole + self.format.code_bytes(self.tail_elements)

    def tiles(self, rows: int, code_offset: int, scale_offset: int) -> tuple[Tile, ...]:
        """Tiles of ``rows`` rows whose codes and scales lie at these offsets, values at 0."""
        block, tail = self.block_elements, self.tail_elements
        nbytes = self.format.code_bytes(block)
        if block == tail:  # one regular array of blocks, whatever the rows
            blocks = rows * self.count
            strides = (block, nbytes, 1)
            return (_tile(blocks, 1, (block, nbytes), (0, code_offset, scale_offset), strides),)
        strides = (self.row_elements, self.code_bytes, self.count)
        before = self.count - 1
        start = (before * block, code_offset + before * nbytes, scale_offset + before)
        sizes = (tail, self.format.code_bytes(tail))
        return (
            _tile(rows, before, (block, nbytes), (0, code_offset, scale_offset), strides),
            _tile(rows, 1, sizes, start, strides),
        )


def _tile(
    rows: int,
    columns: int,
    sizes: tuple[int, int],
    offsets: tuple[int, int, int],
    strides: tuple[int, int, int],
) -> Tile:
    return Tile(
        rows,
        columns,
        *sizes,
        value_offset=offsets[0],
        value_stride=strides[0],
        code_offset=offsets[1],
        code_stride=strides[1],
        scale_offset=offsets[2],
        scale_stride=strides[2],
    )


def merged(tiles: Iterable[Tile]) -> tuple[Tile, ...]:
    """The same blocks in as few tiles as can be, in order."""
    found: list[Tile] = []
    for tile in tiles:
        if found and tile.continues(found[-1]):
            found[-1] = replace(found[-1], rows=found[-1].rows + tile.rows)
        else:
            found.append(tile)
    return tuple(found)
