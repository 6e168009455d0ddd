"""What one rank sends for one group: the layout of a payload, as pure arithmetic.

[Note: payload]
A payload is ``uint8`` of one length on all ranks, in three parts that each start on 64 bytes:

* *codes* of the quantized parameters, in the order they rest in the shard buffer, then in the
  order of their rows;
* *scales* (``float32``), in the same order;
* *raw* chunks of the excluded parameters, in one dtype, each starting on 16 bytes.

All sizes follow from padded chunks, which are the same on every rank: an uneven or empty shard
sends padding. Padding never shares a block with values, because a row is whole or absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from polyshard.sharding.layout import GroupLayout
from polyshard_quantized.formats.base import SCALE_BYTES, BlockFormat
from polyshard_quantized.layout.blocks import RowBlocks, Tile, merged
from polyshard_quantized.layout.exclusions import row_elements

PART_BYTES = 64
RAW_BYTES = 16


@dataclass(frozen=True)
class Quantized:
    """A parameter that travels as codes; its tiles count values from its own first element."""

    index: int
    shard_offset: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Raw:
    """A parameter that travels as it is: ``numel`` values, ``start`` of them into the raw part."""

    index: int
    shard_offset: int
    numel: int
    start: int


@dataclass(frozen=True)
class Payload:
    """What one rank sends for one group; offsets are in bytes. See [Note: payload]."""

    format: BlockFormat
    quantized: tuple[Quantized, ...]
    raw: tuple[Raw, ...]
    raw_dtype: torch.dtype
    scale_offset: int
    scales: int
    raw_offset: int
    nbytes: int

    @cached_property
    def shard_tiles(self) -> tuple[Tile, ...]:
        """All blocks as they lie in a shard buffer, in as few tiles as can be."""
        tiles = (tile.moved(q.shard_offset) for q in self.quantized for tile in q.tiles)
        return merged(tiles)


def align(nbytes: int, unit: int) -> int:
    """``nbytes`` rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit


def plan_payload(
    layout: GroupLayout,
    form: BlockFormat,
    excluded: Mapping[int, str],
    absent: frozenset[int],
    raw_dtype: torch.dtype,
) -> Payload:
    """Lay out the payload of a group.

    Args:
        layout: where its parameters rest.
        form: of the quantized ones.
        excluded: indices of parameters that travel raw, with reasons.
        absent: indices of parameters that do not travel.
        raw_dtype: dtype of raw parameters on the wire.
    """
    order = sorted(range(len(layout.parameters)), key=lambda i: layout.parameters[i].shard_offset)
    quantized: list[Quantized] = []
    raw: list[Raw] = []
    codes = scales = start = 0
    for index in order:
        placed = layout.parameters[index]
        if index in absent or placed.chunk_numel == 0:
            continue
        if index in excluded:
            raw.append(Raw(index, placed.shard_offset, placed.chunk_numel, start))
            start += align(placed.chunk_numel, RAW_BYTES // min(RAW_BYTES, raw_dtype.itemsize))
            continue
        blocks = RowBlocks(row_elements(placed), form)
        rows = placed.chunk_numel // blocks.row_elements
        tiles = blocks.tiles(rows, codes, scales)
        quantized.append(Quantized(index, placed.shard_offset, tiles))
        codes += rows * blocks.code_bytes
        scales += rows * blocks.count
    scale_offset = align(codes, PART_BYTES)
    raw_offset = align(scale_offset + scales * SCALE_BYTES, PART_BYTES)
    nbytes = align(raw_offset + start * raw_dtype.itemsize, PART_BYTES)
    return Payload(
        form, tuple(quantized), tuple(raw), raw_dtype, scale_offset, scales, raw_offset, nbytes
    )
