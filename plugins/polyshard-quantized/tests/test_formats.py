"""Guarantees of the formats: bounds, idempotence, ranges, values that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_groups import DTYPES
from torch import Tensor

from polyshard.errors import SettingError
from polyshard_quantized import BlockFormat, Float8Block, Int4Block, Int8Block, round_trip
from polyshard_quantized.arithmetic.codec import BlockCodec, Nearest
from polyshard_quantized.formats.float8 import Float8Coder
from polyshard_quantized.layout.blocks import RowBlocks
from polyshard_quantized.workspace import Workspace

FORMATS: tuple[BlockFormat, ...] = (
    Int8Block(256),
    Int8Block(100),
    Float8Block(256),
    Int4Block(64),
    Int4Block(9),
)
ids = [f"{type(f).__name__}-{f.block_elements}" for f in FORMATS]
each_format = pytest.mark.parametrize("form", FORMATS, ids=ids)


def encoded(values: Tensor, form: BlockFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``[blocks, block]`` values."""
    codes = torch.empty(values.shape[0], form.code_bytes(values.shape[1]), dtype=torch.uint8)
    scales = torch.empty(values.shape[0], 1)
    BlockCodec(form, Workspace(), Nearest()).encode(values, codes, scales)
    return codes, scales


def decoded(codes: Tensor, scales: Tensor, form: BlockFormat, size: int) -> Tensor:
    out = torch.empty(codes.shape[0], size)
    BlockCodec(form, Workspace(), Nearest()).coder.load(codes, scales, out)
    return out


def drawn(seed: int, rows: int, size: int, exponent: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=generator) * 10.0**exponent


blocks = st.tuples(
    st.integers(0, 1 << 30), st.integers(1, 6), st.integers(1, 300), st.integers(-36, 37)
)


@given(blocks, st.sampled_from([Int8Block(), Int4Block()]))
@settings(deadline=None, max_examples=150)
def test_errors_are_at_most_half_a_scale(
    block: tuple[int, int, int, int], form: BlockFormat
) -> None:
    values = drawn(*block)
    codes, scales = encoded(values, form)
    error = (decoded(codes, scales, form, values.shape[1]).double() - values.double()).abs()
    assert bool((error <= scales.double() / 2 * (1 + 2.0**-16)).all())


@given(blocks)
@settings(deadline=None, max_examples=100)
def test_float8_errors_are_relative(block: tuple[int, int, int, int]) -> None:
    values = drawn(*block)
    codes, scales = encoded(values, Float8Block())
    found = decoded(codes, scales, Float8Block(), values.shape[1]).double()
    # Half a unit of the last of 4 bits, or of the subnormal ones; the truncated scale adds 2**-16.
    bound = torch.maximum(values.double().abs() * 2.0**-4, scales.double() * 2.0**-10)
    assert bool(((found - values.double()).abs() <= bound * (1 + 2.0**-10)).all())


@given(blocks, st.sampled_from(FORMATS))
@settings(deadline=None, max_examples=200)
def test_encoding_what_was_decoded_changes_no_bit(
    block: tuple[int, int, int, int], form: BlockFormat
) -> None:
    values = drawn(*block)
    codes, scales = encoded(values, form)
    once = decoded(codes, scales, form, values.shape[1])
    again, same_scales = encoded(once, form)
    assert torch.equal(same_scales, scales)
    assert torch.equal(decoded(again, same_scales, form, values.shape[1]), once)
    if not isinstance(form, Float8Block):  # which has two zeros
        assert torch.equal(again, codes)


@given(blocks)
@settings(deadline=None, max_examples=100)
def test_int8_codes_stay_in_range(block: tuple[int, int, int, int]) -> None:
    codes, _ = encoded(drawn(*block), Int8Block())
    assert int(codes.view(torch.int8).min()) >= -127


@pytest.mark.parametrize("largest", [3.4e38, 1.0, 2.0**-126, 1e-45, 0.0])
@each_format
def test_extreme_blocks(form: BlockFormat, largest: float) -> None:
    values = torch.linspace(-1, 1, 33)[None] * largest
    codes, scales = encoded(values, form)
    found = decoded(codes, scales, form, 33)
    assert bool(found.isfinite().all())
    assert float((found - values).abs().max()) <= float(scales) * form.largest_code / 7
    if largest == 0.0:
        assert torch.equal(found, values)


def test_every_float8_code_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)[None]
    real = torch.tensor([c & 0x7F != 0x7F for c in range(256)])
    out = torch.empty(1, 256)
    Float8Coder(Workspace()).load(codes, torch.ones(1, 1), out)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(out[0, real], expected[0, real])
    assert bool(expected[0, ~real].isnan().all())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_format
def test_values_that_are_not_finite_stay_visible(
    form: BlockFormat, dtype: torch.dtype, bad: float
) -> None:
    size = form.block_elements
    values = torch.randn(3, 2 * size).to(dtype)
    values[1, size + 3] = bad
    found = round_trip(values, form)
    assert not bool(found[1, size:].isfinite().any())  # the block
    assert bool(found[1, :size].isfinite().all())
    assert bool(found[[0, 2]].isfinite().all())


def test_a_nan_of_any_payload_stays_visible() -> None:
    for bits in (0x7F800001, 0x7FFFFFFF, -1, -0x400000, -0x7FFFFF):  # signalling, quiet, negative
        values = torch.ones(1, 256)
        values.view(torch.int32)[0, 7] = bits
        assert math.isnan(values[0, 7])
        assert not bool(round_trip(values, Int8Block()).isfinite().any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_format
def test_dtypes_are_read_as_what_they_are(form: BlockFormat, dtype: torch.dtype) -> None:
    values = torch.randn(7, 300).to(dtype)
    expected = round_trip(values.float(), form).to(dtype)
    assert torch.equal(round_trip(values, form), expected)


def test_float16_overflow_is_infinite_not_wrapped() -> None:
    values = torch.full((1, 64), 60000.0, dtype=torch.float16)
    values[0, 0] = 65504
    assert bool(round_trip(values, Int8Block()).isfinite().all())
    wide = torch.full((1, 64), 1e6)
    assert bool(torch.isinf(round_trip(wide, Int8Block()).half()).all())


@given(st.integers(1, 2000), st.sampled_from(FORMATS))
def test_rows_are_cut_into_the_fewest_blocks(row: int, form: BlockFormat) -> None:
    cut = RowBlocks(row, form)
    assert cut.count == -(-row // form.block_elements)
    assert 1 <= cut.tail_elements <= cut.block_elements <= form.block_elements
    assert (cut.count - 1) * cut.block_elements + cut.tail_elements == row


@pytest.mark.parametrize("size", [0, 7, 1 << 17, 12.5, True, "256"])
def test_blocks_that_make_no_sense_are_refused(size: object) -> None:
    with pytest.raises(SettingError, match="block_elements"):
        Int8Block(size)  # type: ignore[arg-type]
