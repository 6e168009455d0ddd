"""Tiles as views of real tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polyshard_quantized.formats.base import SCALE_BYTES
from polyshard_quantized.layout.blocks import Tile, split
from polyshard_quantized.layout.payload import Payload, Raw


@dataclass(frozen=True)
class Piece:
    """Some blocks: values ``[..., block]``, codes ``[..., nbytes]``, scales ``[..., 1]``."""

    values: Tensor
    codes: Tensor
    scales: Tensor


class Parts:
    """The parts of payloads ``[rows, nbytes]`` (``uint8``), ready for views."""

    def __init__(self, payloads: Tensor, plan: Payload) -> None:
        self.codes = payloads
        end = plan.scale_offset + plan.scales * SCALE_BYTES
        self.scales = payloads[:, plan.scale_offset : end].view(torch.float32)
        self.raw = payloads[:, plan.raw_offset :].view(plan.raw_dtype)

    def raw_rows(self, raw: Raw) -> Tensor:
        """``[rows, numel]`` of an excluded parameter."""
        return self.raw[:, raw.start : raw.start + raw.numel]


def pieces(values: Tensor, parts: Parts, tile: Tile, elements: int) -> Iterator[Piece]:
    """A tile of every row of payloads, in pieces of about ``elements`` values.

    Args:
        values: ``[rows, n]``, each row contiguous, rows possibly apart.
        parts: of as many payloads.
        tile: where blocks lie in a row.
        elements: values that fit the cache.
    """
    rows = values.shape[0]
    if rows * tile.elements <= elements:
        yield _piece(values, parts, tile)
        return
    for row in range(rows):
        one = slice(row, row + 1)
        for part in split(tile, elements):
            yield _piece(values[one], _row(parts, one), part)


def rank_pieces(
    out: Tensor, parts: Parts, tile: Tile, elements: int
) -> Iterator[tuple[Piece, ...]]:
    """One tile of ``out`` (``[n]``) beside the same tile of every payload.

    Yields, for each run of about ``elements`` values, a piece per payload in rank order; all have
    the same ``values``, a view of ``out``.
    """
    flat = out[None]
    ranks = [_row(parts, slice(r, r + 1)) for r in range(parts.codes.shape[0])]
    for part in split(tile, elements):
        yield tuple(_piece(flat, rank, part) for rank in ranks)


@dataclass(frozen=True)
class _Row:
    codes: Tensor
    scales: Tensor


def _row(parts: Parts, one: slice) -> _Row:
    return _Row(parts.codes[one], parts.scales[one])


def _piece(values: Tensor, parts: Parts | _Row, tile: Tile) -> Piece:
    shape = (values.shape[0], tile.rows, tile.columns)
    return Piece(
        _strided(values, shape, tile.block_elements, (tile.value_stride, tile.value_offset)),
        _strided(parts.codes, shape, tile.code_bytes, (tile.code_stride, tile.code_offset)),
        _strided(parts.scales, shape, 1, (tile.scale_stride, tile.scale_offset)),
    )


def _strided(base: Tensor, shape: tuple[int, int, int], size: int, row: tuple[int, int]) -> Tensor:
    """``[payloads, rows, columns, size]`` of ``base`` (``[payloads, n]``)."""
    stride, offset = row
    if base.shape[0] == 1:  # blocks of one payload: fewer dims, less work for each operation
        if shape[2] == 1:
            start = base.storage_offset() + offset
            return base.as_strided((shape[1], size), (stride, 1), start)
        start = base.storage_offset() + offset
        return base.as_strided((shape[1], shape[2], size), (stride, size, 1), start)
    return base.as_strided(
        (*shape, size), (base.stride(0), stride, size, 1), base.storage_offset() + offset
    )


def rows_of(chunk: Tensor) -> Tensor:
    """``chunk`` (``[rows, n]``) with contiguous rows."""
    return chunk if chunk.shape[1] <= 1 or chunk.stride(1) == 1 else chunk.contiguous()
