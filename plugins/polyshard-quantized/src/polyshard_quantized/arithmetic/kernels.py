"""Encoding and decoding as one kernel each, in Triton; bitwise what :mod:`.codec` computes.

Imported on first use on CUDA only, and where Triton is installed (torch brings it there). A program
works on a few whole blocks. Everything is IEEE ``float32`` and integer arithmetic, so no device may
answer differently: division is rounded to nearest, rounding to whole numbers is an addition (see
:data:`_HALF_WAY`), and e4m3 is made of bits, as not every GPU converts it.
"""

# ruff: noqa: PLR0917 - a kernel is given pointers, sizes and strides one by one
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyshard_quantized.formats.base import BlockFormat

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_HALF_WAY = tl.constexpr(1.5 * 2**23)
"""Adding and subtracting it rounds what is smaller than 2^22 to the nearest whole number, ties to
even, because ``float32`` has no room for a fraction beside it."""

PROGRAM_ELEMENTS = 4096
"""Values that one program works on, unless a block alone has more."""


@triton.jit
def _is_nan(values):
    return (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def _scale_of(largest, is_nan, largest_code):
    """Scales of blocks whose largest magnitudes are ``largest``. See [Note: exact scales]."""
    scale = tl.div_rn(largest, tl.zeros_like(largest) + largest_code)
    scale = (scale.to(tl.int32, bitcast=True) & -128).to(tl.float32, bitcast=True)
    scale = tl.where(scale < _TINY, _TINY, scale)
    return tl.where(is_nan != 0, float("nan"), scale)


@triton.jit
def _rounded(values):
    return (values + _HALF_WAY) - _HALF_WAY


@triton.jit
def _e4m3_bits(values):
    """To nearest, ties to even; values are at most 448 and a rounding error."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Below 2^-6 codes are multiples of 2^-9: so are the last bits of a number beside 2^14.
    beside = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = beside.to(tl.int32, bitcast=True) - 0x46800000
    is_odd = (magnitude >> 20) & 1
    normal = (magnitude - (120 << 23) + 0x7FFFF + is_odd) >> 20
    code = tl.where(magnitude < (121 << 23), subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _wide(values):
    """In ``float32``, exactly; of ``bfloat16`` by its bits, so that nothing small is flushed."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # chosen while compiling, when only one branch may return
        return values.to(tl.float32)


@triton.jit
def _as_bfloat16(values):
    """To nearest, ties to even, whatever a backend's own conversion does."""
    bits = values.to(tl.int32, bitcast=True)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    upper = tl.where(_is_nan(values), 0x7FC0, upper)
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _encode(
    values,
    codes,
    scales,
    blocks,
    rows,
    columns,
    size,
    nbytes,
    value_payload,
    value_row,
    code_payload,
    code_row,
    scale_payload,
    scale_row,
    largest_code: tl.constexpr,
    kind: tl.constexpr,
    program_blocks: tl.constexpr,
    width: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * program_blocks + tl.arange(0, program_blocks)
    column, row = block % columns, (block // columns) % rows
    payload = block // (columns * rows)
    is_block = (block < blocks)[:, None]
    within = tl.arange(0, width)[None, :]
    start = (payload * value_payload + row * value_row + column * size)[:, None]
    code_start = (payload * code_payload + row * code_row + column * nbytes)[:, None]
    if kind == 2:  # two halves of a block share bytes
        has_low, has_high = is_block & (within < nbytes), is_block & (within < size - nbytes)
        low = _wide(tl.load(values + start + within, mask=has_low, other=0.0))
        high = _wide(tl.load(values + start + nbytes + within, mask=has_high, other=0.0))
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
        is_nan = tl.max((_is_nan(low) | _is_nan(high)).to(tl.int32), 1)
        scale = _scale_of(largest, is_nan, largest_code)
        divisor = scale[:, None] + tl.zeros_like(low)
        low = _rounded(tl.div_rn(low, divisor)).to(tl.int32)
        high = _rounded(tl.div_rn(high, divisor)).to(tl.int32)
        tl.store(codes + code_start + within, (low + high * 16 + 136).to(tl.uint8), mask=has_low)
    else:
        exists = is_block & (within < size)
        found = _wide(tl.load(values + start + within, mask=exists, other=0.0))
        largest = tl.max(tl.abs(found), 1)
        is_nan = tl.max(_is_nan(found).to(tl.int32), 1)
        scale = _scale_of(largest, is_nan, largest_code)
        quotients = tl.div_rn(found, scale[:, None] + tl.zeros_like(found))
        if kind == 1:
            made = _e4m3_bits(quotients)
        else:
            made = _rounded(quotients).to(tl.int32).to(tl.uint8)
        tl.store(codes + code_start + within, made, mask=exists)
    scale_at = payload * scale_payload + row * scale_row + column
    tl.store(scales + scale_at, scale, mask=block < blocks)


@triton.jit
def _load(
    codes,
    scales,
    out,
    blocks,
    rows,
    columns,
    size,
    nbytes,
    out_payload,
    out_row,
    code_payload,
    code_row,
    scale_payload,
    scale_row,
    kind: tl.constexpr,
    program_blocks: tl.constexpr,
    width: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * program_blocks + tl.arange(0, program_blocks)
    column, row = block % columns, (block // columns) % rows
    payload = block // (columns * rows)
    within = tl.arange(0, width)[None, :]
    exists = (block < blocks)[:, None] & (within < size)
    scale_at = payload * scale_payload + row * scale_row + column
    scale = tl.load(scales + scale_at, mask=block < blocks, other=1.0)[:, None]
    code_start = codes + (payload * code_payload + row * code_row + column * nbytes)[:, None]
    if kind == 2:
        byte = tl.load(code_start + within % nbytes, mask=exists, other=0).to(tl.int32)
        code = tl.where(within < nbytes, byte & 15, byte >> 4) - 8
        found = code.to(tl.float32) * scale
    elif kind == 1:
        byte = tl.load(code_start + within, mask=exists, other=0).to(tl.int16)
        bits = ((byte & 0x7F) << 7) | ((byte & 0x80) << 8)
        found = bits.to(tl.float16, bitcast=True).to(tl.float32) * (scale * 256.0)
    else:
        byte = tl.load(code_start + within, mask=exists, other=0).to(tl.int8, bitcast=True)
        found = byte.to(tl.float32) * scale
    start = (payload * out_payload + row * out_row + column * size)[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out + start + within, _as_bfloat16(found), mask=exists)
    else:
        tl.store(out + start + within, found.to(out.dtype.element_ty), mask=exists)


def _kind(form: BlockFormat) -> int:
    """What the kernels branch on: a value of :class:`.KernelCodes`."""
    assert form.kernel_codes is not None  # others never come here
    return int(form.kernel_codes)


def _as_four(tensor: Tensor) -> Tensor:
    """``[payloads, rows, columns, size]``; blocks of one row follow each other."""
    if tensor.ndim == 2:
        return tensor[None, :, None]
    return tensor[None] if tensor.ndim == 3 else tensor


def _launch(
    kernel: Any, pointers: tuple[Tensor, ...], arrays: tuple[Tensor, ...], **constants: Any
) -> None:
    """Run ``kernel`` over all blocks of ``arrays``: values, codes, scales."""
    values, codes, scales = (_as_four(a) for a in arrays)
    payloads, rows, columns, size = values.shape
    blocks = payloads * rows * columns
    if not blocks:
        return
    width = 1 << (size - 1).bit_length()
    program_blocks = 1 << max(0, int(math.log2(PROGRAM_ELEMENTS // min(width, PROGRAM_ELEMENTS))))
    strides = (s for a in (values, codes, scales) for s in a.stride()[:2])
    kernel[(-(-blocks // program_blocks),)](
        *pointers,
        blocks,
        rows,
        columns,
        size,
        codes.shape[-1],
        *strides,
        program_blocks=program_blocks,
        width=width,
        **constants,
    )


def encode(form: BlockFormat, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See :meth:`polyshard_quantized.arithmetic.codec.BlockCodec.encode`; rounds to nearest."""
    _launch(
        _encode,
        (values, codes, scales),
        (values, codes, scales),
        kind=_kind(form),
        largest_code=form.largest_code,
    )


def load(form: BlockFormat, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fill ``out`` (``[..., block]``, any floating dtype) with code times scale, rounded once."""
    _launch(_load, (codes, scales, out), (out, codes, scales), kind=_kind(form))
