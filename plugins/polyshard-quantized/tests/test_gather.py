"""The gather codec without processes: world sizes, dtypes, layouts, bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_groups import DTYPES, Dtypes, Toy, toys, values_of, whole
from torch import Tensor

from polyshard_quantized import (
    BlockFormat,
    Exclusions,
    Float8Block,
    Int4Block,
    Int8Block,
    QuantizedComm,
    round_trip,
)
from polyshard_quantized.transfers.gather import BoundGather, QuantizedGather
from polyshard_quantized.workspace import Workspace

SHAPES = ((64, 300), (7, 130), (1, 64), (3, 5, 40), (2, 8), (33,), (0, 4), (), (1,))
FORMATS: tuple[BlockFormat, ...] = (Int8Block(), Float8Block(), Int4Block(32))
EVERYTHING = Exclusions(min_ndim=0, min_numel=0)


def bind(toy: Toy, form: BlockFormat, exclude: Exclusions = EVERYTHING) -> BoundGather:
    codec = QuantizedGather(form, exclude, Workspace()).bind(toy.info, toy.layout)
    assert codec is not None
    return codec


def gathered(members: list[Toy], form: BlockFormat, values: list[Tensor]) -> list[Tensor]:
    """What every rank decodes; all of them the same."""
    payloads = []
    for toy in members:
        codec = bind(toy, form)
        payload = torch.full((codec.payload_bytes,), 0xAB, dtype=torch.uint8)
        codec.encode(toy.shard(values), payload)
        payloads.append(payload)
    results = []
    for toy in members:
        regions = toy.regions()
        bind(toy, form).decode(torch.stack(payloads), regions)
        pairs = zip(regions, toy.layout.parameters, strict=True)
        results.append([r[0].view(()) if p.dim is None else whole(r, p.shape) for r, p in pairs])
    for result in results[1:]:
        for mine, first in zip(result, results[0], strict=True):
            assert torch.equal(mine, first)
    return results[0]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_results_do_not_depend_on_the_world_size(form: BlockFormat) -> None:
    values = values_of(SHAPES)
    expected = gathered(toys(SHAPES, 1), form, values)
    for world_size in (2, 3, 4, 5, 7):
        found = gathered(toys(SHAPES, world_size), form, values)
        for mine, single in zip(found, expected, strict=True):
            assert torch.equal(mine, single)


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=5),
    st.integers(1, 7),
    st.sampled_from(FORMATS),
)
@settings(deadline=None, max_examples=120)
def test_any_group_on_any_world(
    shapes: list[tuple[int, ...]], world_size: int, form: BlockFormat
) -> None:
    members = toys(shapes, world_size)
    found = QuantizedGather(form, EVERYTHING, Workspace())
    if found.bind(members[0].info, members[0].layout) is None:
        assert found.report is not None
        assert found.report.quantized_share == 0
        assert all(p.excluded for p in found.report.parameters)
        return
    values = values_of(shapes)
    assert found.report is not None
    decisions = [p.excluded is None for p in found.report.parameters]
    results = gathered(members, form, values)
    for value, result, quantized in zip(values, results, decisions, strict=True):
        assert torch.equal(result, round_trip(value, form) if quantized else value)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("param", DTYPES, ids=str)
@pytest.mark.parametrize("orig", DTYPES, ids=str)
def test_every_pair_of_dtypes(orig: torch.dtype, param: torch.dtype, form: BlockFormat) -> None:
    """Nothing is read as another dtype, and what is decoded is cast once."""
    shapes = ((16, 200), (9,))
    values = values_of(shapes, dtype=orig)
    matrix, vector = gathered(toys(shapes, 2, Dtypes(orig, param)), form, values)
    assert matrix.dtype == vector.dtype == param
    assert torch.equal(matrix, round_trip(values[0].float(), form).to(param))
    assert torch.equal(vector, values[1].to(param))


@pytest.mark.parametrize(
    ("param", "width", "bar"),
    [
        (torch.float32, 128, 0.26),
        (torch.float32, 300, 0.26),
        (torch.float32, 1024, 0.26),
        (torch.bfloat16, 256, 0.51),
        (torch.bfloat16, 1024, 0.51),
        (torch.bfloat16, 128, 0.52),  # a row of half a block still has a scale of its own
    ],
)
def test_matrices_stay_below_the_bar(param: torch.dtype, width: int, bar: float) -> None:
    toy = toys([(512, width), (512, width)], 4, Dtypes(param=param))[1]
    codec = QuantizedGather(Int8Block(), Exclusions(), Workspace())
    bound = codec.bind(toy.info, toy.layout)
    assert bound is not None
    assert codec.report is not None
    assert codec.report.wire_bytes == 3 * bound.payload_bytes
    assert codec.report.native_bytes == 3 * 2 * 128 * width * param.itemsize
    assert codec.report.wire_bytes <= bar * codec.report.native_bytes


def test_the_same_tensors_are_bound_once() -> None:
    """A step makes no views: pieces are those of the first call."""
    toy = toys(SHAPES, 1)[0]
    codec = bind(toy, Int8Block())
    shard = toy.shard(values_of(SHAPES))
    payload = torch.empty(codec.payload_bytes, dtype=torch.uint8)
    payloads, regions = payload[None], toy.regions()
    codec.encode(shard, payload)
    codec.decode(payloads, regions)
    kept = codec._pieces, codec._encoder._pieces
    shard.mul_(2)
    codec.encode(shard, payload)
    codec.decode(payloads, regions)
    assert (codec._pieces, codec._encoder._pieces) == kept
    assert kept[0] is codec._pieces
    expected = round_trip(2 * values_of(SHAPES)[0], Int8Block())
    assert torch.equal(whole(regions[0], SHAPES[0]), expected)


def test_adjacent_matrices_are_encoded_as_one() -> None:
    toy = toys([(64, 512)] * 6, 2)[0]
    assert len(bind(toy, Int8Block())._plan.shard_tiles) == 1


def test_large_parameters_are_cut_into_pieces_that_fit_the_cache() -> None:
    shapes = ((1100, 1030),)  # several pieces, with tails
    values = values_of(shapes)
    for world_size in (1, 3):
        (found,) = gathered(toys(shapes, world_size), Int8Block(), values)
        assert torch.equal(found, round_trip(values[0], Int8Block()))


def test_exclusions_name_their_reason() -> None:
    shapes = ((64, 64), (64,), (4, 4), (0, 9), (5000, 3))
    toy = toys(shapes, 2)[0]
    codec = QuantizedGather(Int8Block(), Exclusions(min_numel=64), Workspace())
    assert codec.bind(toy.info, toy.layout) is not None
    assert codec.report is not None
    reasons = {p.fqn: p.excluded for p in codec.report.parameters}
    assert reasons["p0"] is None
    assert reasons["p1"] == "ndim 1 < 2"
    assert reasons["p2"] == "numel 16 < 64"
    assert reasons["p3"] == "numel 0 < 64"
    assert "rows of 3 elements" in str(reasons["p4"])
    assert any("p1" in line for line in codec.notices)


def test_names_exclude() -> None:
    toy = toys([(64, 64), (64, 64)], 1)[0]
    plugin = QuantizedComm(exclude=Exclusions(min_numel=0, fqns=("p1", "nobody.*")))
    codec = plugin.polyshard_gather_codec(toy.info)
    assert codec is not None
    assert codec.bind(toy.info, toy.layout) is not None
    report = plugin.report()
    assert report.unused_patterns == ("nobody.*",)
    assert "nobody.*" in str(report)
    (group,) = report.groups
    assert group.gather is not None
    assert group.gather.parameters[1].excluded == "its name matches 'p1'"
    assert group.gather.quantized_share == 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_dtypes_without_a_quantized_form_stay_native(dtype: torch.dtype) -> None:
    toy = toys([(64, 64)], 2, Dtypes(dtype, dtype, dtype))[0]
    codec = QuantizedGather(Int8Block(), EVERYTHING, Workspace())
    assert codec.bind(toy.info, toy.layout) is None
    assert codec.report is not None
    assert codec.report.wire_bytes == codec.report.native_bytes
    assert "no quantized form" in str(codec.report.parameters[0].excluded)
