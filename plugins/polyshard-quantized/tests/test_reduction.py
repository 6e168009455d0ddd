"""The reduce codec without processes: order, bounds, rounding, error feedback."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_groups import Dtypes, Toy, toys, values_of
from torch import Tensor

from polyshard.errors import SettingError
from polyshard_quantized import (
    BlockFormat,
    ErrorFeedback,
    Exclusions,
    Float8Block,
    Int4Block,
    Int8Block,
    round_trip,
)
from polyshard_quantized.transfers.reduction import BoundReduce, GradientSettings, QuantizedReduce
from polyshard_quantized.workspace import Workspace

SHAPES = ((64, 300), (7, 130), (1, 64), (33,), (0, 4), ())
EVERYTHING = Exclusions(min_ndim=0, min_numel=0)
PLAIN = GradientSettings(Int8Block(), "nearest", 0, None, hierarchical=True)


def factory(settings_: GradientSettings = PLAIN) -> QuantizedReduce:
    return QuantizedReduce(settings_, EVERYTHING, Workspace())


def bind(toy: Toy, settings_: GradientSettings = PLAIN) -> BoundReduce:
    codec = factory(settings_).bind(toy.info, toy.layout)
    assert codec is not None
    return codec


def sent(codec: BoundReduce, toy: Toy, gradients: list[Tensor]) -> Tensor:
    payloads = torch.full((toy.layout.world_size, codec.payload_bytes), 0xAB, dtype=torch.uint8)
    codec.encode(toy.chunks(gradients), payloads)
    return payloads


def reduced(
    members: list[Toy], gradients: list[list[Tensor]], settings_: GradientSettings = PLAIN
) -> list[list[Tensor]]:
    """Every rank's outs, given every rank's gradients."""
    codecs = [bind(toy, settings_) for toy in members]
    rows = [sent(c, t, g) for c, t, g in zip(codecs, members, gradients, strict=True)]
    results = []
    for toy, codec in zip(members, codecs, strict=True):
        outs = toy.outs()
        codec.decode_sum(torch.stack([r[toy.info.rank] for r in rows]), outs)
        results.append(outs)
    return results


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", [Int8Block(), Float8Block(), Int4Block(32)], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_sums_are_those_of_what_was_sent_in_rank_order(
    world_size: int, form: BlockFormat, reduce: torch.dtype
) -> None:
    members = toys(SHAPES, world_size, Dtypes(reduce=reduce))
    gradients = [values_of(SHAPES, seed, reduce) for seed in range(world_size)]
    results = reduced(members, gradients, replace(PLAIN, format=form))
    for index, placed in enumerate(members[0].layout.parameters):
        quantized = placed.dim is not None and len(placed.shape) > 1 and placed.numel
        terms = [g[index] for g in gradients]
        if quantized:
            terms = [round_trip(t.float(), form) for t in terms]
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        for rank, outs in enumerate(results):
            if placed.dim is None:
                assert torch.equal(outs[index].view(()), total.to(reduce))
                continue
            start, stop = placed.bounds(rank)
            mine = outs[index][: placed.local_numel(rank)].view(placed.local_shape(rank))
            assert torch.equal(mine, total[start:stop].to(reduce))


@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(-30, 30))
@settings(deadline=None, max_examples=60)
def test_errors_of_sums_are_bounded(seed: int, world_size: int, exponent: int) -> None:
    shapes = ((11, 70),)
    members = toys(shapes, world_size)
    gradients = [
        [v * 10.0**exponent for v in values_of(shapes, seed + rank)] for rank in range(world_size)
    ]
    results = reduced(members, gradients)
    exact = torch.stack([g[0].double() for g in gradients]).sum(0)
    # Half a scale of each rank's row, and the rounding of fp32 sums.
    rows = [g[0].double().abs().amax(1, keepdim=True) for g in gradients]
    bound = torch.stack(rows).sum(0) / 254
    placed = members[0].layout.parameters[0]
    for rank, outs in enumerate(results):
        start, stop = placed.bounds(rank)
        mine = outs[0][: placed.local_numel(rank)].view(placed.local_shape(rank)).double()
        error = (mine - exact[start:stop]).abs()
        assert bool((error <= bound[start:stop] * (1 + 1e-4)).all())


def test_chunks_are_only_read() -> None:
    toy = toys(SHAPES, 2)[0]
    chunks = toy.chunks(values_of(SHAPES))
    before = [c.clone() for c in chunks]
    codec = bind(toy, replace(PLAIN, format=Int4Block(), error_feedback=ErrorFeedback()))
    codec.encode(chunks, torch.empty(2, codec.payload_bytes, dtype=torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(chunks, before, strict=True))


def test_a_gradient_that_is_missing_counts_as_zero() -> None:
    toy = toys(SHAPES, 2)[0]
    codec = bind(toy)
    chunks = [c.new_zeros(1, 1).expand(c.shape) for c in toy.chunks(values_of(SHAPES))]
    payloads = torch.empty(2, codec.payload_bytes, dtype=torch.uint8)
    codec.encode(chunks, payloads)
    outs = toy.outs()
    codec.decode_sum(payloads, outs)
    assert all(bool((o == 0).all()) for o in outs)


def test_overflow_of_one_rank_reaches_the_sum() -> None:
    members = toys([(8, 256)], 2, Dtypes(reduce=torch.float16))
    gradients = [values_of([(8, 256)], seed, torch.float16) for seed in range(2)]
    gradients[1][0][2, 5] = torch.inf
    results = reduced(members, gradients)
    assert not bool(results[0][0].view(4, 256)[2].isfinite().any())
    assert bool(results[1][0].isfinite().all())


STOCHASTIC = replace(PLAIN, rounding="stochastic", seed=3)


@pytest.mark.parametrize("form", [Int8Block(64), Int4Block(64)], ids=str)
def test_stochastic_rounding_is_right_on_average(form: BlockFormat) -> None:
    draws, shapes = 4096, ((2, 64),)
    toy = toys(shapes, 1)[0]
    codec = bind(toy, replace(STOCHASTIC, format=form))
    (values,) = values_of(shapes)
    outs = toy.outs()
    total = torch.zeros(128, dtype=torch.float64)
    for _ in range(draws):
        codec.decode_sum(sent(codec, toy, [values]), outs)
        total += outs[0].double()
    scale = values.abs().amax(1, keepdim=True).double() / form.largest_code
    sigma = scale * 0.5 / draws**0.5
    # The largest value of a row may lie 2**-16 above the largest code, where it is cut.
    cut = scale * form.largest_code * 2.0**-16
    error = (total.view(2, 64) / draws - values.double()).abs()
    assert bool((error <= 4 * sigma + cut).all())


def test_stochastic_rounding_follows_its_seed_alone() -> None:
    toy, gradients = toys(SHAPES, 2)[0], values_of(SHAPES)
    runs = []
    for settings_ in (STOCHASTIC, STOCHASTIC, replace(STOCHASTIC, seed=4)):
        codec = bind(toy, settings_)
        torch.rand(7)  # other draws of the program
        runs.append([sent(codec, toy, gradients) for _ in range(2)])
    first, second, other = runs
    for a, b in zip(first, second, strict=True):
        _assert_same(codec, a, b)
    with pytest.raises(AssertionError):
        _assert_same(codec, first[0], first[1])  # every reduction draws anew
    with pytest.raises(AssertionError):
        _assert_same(codec, first[0], other[0])


def _assert_same(codec: BoundReduce, a: Tensor, b: Tensor) -> None:
    codes = slice(0, codec._plan.scale_offset)
    assert torch.equal(a[:, codes], b[:, codes])


def test_feedback_keeps_exactly_what_was_not_sent() -> None:
    shapes = ((6, 100),)
    toy = toys(shapes, 2)[0]
    form = Int4Block(32)
    reduce = factory(replace(PLAIN, format=form, error_feedback=ErrorFeedback()))
    codec = reduce.bind(toy.info, toy.layout)
    assert codec is not None
    residual = torch.zeros(6, 100)
    for seed in range(3):
        (gradient,) = values_of(shapes, seed)
        wanted = residual + gradient
        payloads = sent(codec, toy, [gradient])
        outs = toy.outs()
        for rank in range(2):
            codec.decode_sum(payloads[rank][None], outs)
            assert torch.equal(outs[0].view(3, 100), round_trip(wanted, form)[3 * rank :][:3])
        residual = wanted - round_trip(wanted, form)
        assert reduce.state.residuals is not None
        assert torch.equal(reduce.state.residuals.values[0].view(6, 100), residual)


def test_feedback_makes_many_steps_right() -> None:
    """Summed over steps, what was left out stays one error; without feedback it grows."""
    shapes, steps = ((4, 64),), 50
    toy = toys(shapes, 1)[0]
    (gradient,) = values_of(shapes)
    errors = []
    for feedback in (None, ErrorFeedback()):
        codec = bind(toy, replace(PLAIN, format=Int4Block(), error_feedback=feedback))
        total, outs = torch.zeros(256), toy.outs()
        for _ in range(steps):
            codec.decode_sum(sent(codec, toy, [gradient]), outs)
            total += outs[0]
        errors.append(float((total - steps * gradient.view(-1)).abs().max()))
    assert errors[1] < errors[0] / 10
    assert errors[1] <= 1.01 * float(gradient.abs().max()) / 7 * 1.5


def test_feedback_decays_resets_and_forgets_overflow() -> None:
    shapes = ((2, 64),)
    toy = toys(shapes, 1)[0]
    feedback = ErrorFeedback(decay=0.5, reset_every=2)
    reduce = factory(replace(PLAIN, format=Int4Block(), error_feedback=feedback))
    codec = reduce.bind(toy.info, toy.layout)
    assert codec is not None
    (gradient,) = values_of(shapes)
    form = Int4Block()
    held = []
    for _ in range(3):
        sent(codec, toy, [gradient])
        assert reduce.state.residuals is not None
        held.append(reduce.state.residuals.values[0].clone().view(2, 64))
    assert torch.equal(held[0], (gradient - round_trip(gradient, form)) * 0.5)
    assert torch.equal(held[2], held[0])  # the third starts anew
    assert not torch.equal(held[1], held[0])
    gradient[0, 0] = torch.inf
    sent(codec, toy, [gradient])
    assert reduce.state.residuals is not None
    assert bool(reduce.state.residuals.values[0].isfinite().all())


def test_state_goes_on_where_it_was_saved() -> None:
    toy = toys(SHAPES, 2)[0]
    settings_ = replace(STOCHASTIC, format=Int4Block(), error_feedback=ErrorFeedback())
    straight, resumed = factory(settings_), factory(settings_)
    payloads = []
    codec = straight.bind(toy.info, toy.layout)
    assert codec is not None
    for step in range(4):
        payloads.append(sent(codec, toy, values_of(SHAPES, step)))
        if step == 1:
            saved = straight.state.state_dict()
            resumed.bind(toy.info, toy.layout)
            resumed.state.load_state_dict(saved)
    resumed_codec = resumed.bind(toy.info, toy.layout)  # as after a conversion
    assert resumed_codec is not None
    for step in (2, 3):
        _assert_same(codec, sent(resumed_codec, toy, values_of(SHAPES, step)), payloads[step])


def test_state_of_another_world_or_model_is_refused() -> None:
    settings_ = replace(PLAIN, error_feedback=ErrorFeedback())
    reduces = []
    for shapes, world_size in ((SHAPES, 2), (SHAPES, 3), (SHAPES[1:], 2)):
        toy = toys(shapes, world_size)[0]
        reduces.append(factory(settings_))
        codec = reduces[-1].bind(toy.info, toy.layout)
        assert codec is not None
        sent(codec, toy, values_of(shapes))
    with pytest.raises(SettingError, match="saved on 2 ranks"):
        reduces[1].state.load_state_dict(reduces[0].state.state_dict())
    foreign = reduces[0].state.state_dict()
    foreign["residuals"]["elsewhere.weight"] = torch.zeros(1)
    with pytest.raises(SettingError, match=r"elsewhere\.weight"):
        reduces[2].state.load_state_dict(foreign)


def test_frozen_parameters_do_not_travel() -> None:
    toy = toys(SHAPES, 2)[0]
    whole = bind(toy)
    frozen = tuple(replace(p, requires_grad=i == 1) for i, p in enumerate(toy.info.parameters))
    part = bind(Toy(replace(toy.info, parameters=frozen), toy.layout))
    assert part.payload_bytes < whole.payload_bytes / 4
    none = tuple(replace(p, requires_grad=False) for p in frozen)
    assert factory().bind(replace(toy.info, parameters=none), toy.layout) is None


def test_bytes_fall_with_bits() -> None:
    toy = toys([(512, 1024)], 4)[0]
    nbytes = [
        bind(toy, replace(PLAIN, format=form)).payload_bytes for form in (Int8Block(), Int4Block())
    ]
    native = 128 * 1024 * 4
    assert [b / native for b in nbytes] == [(1 + 4 / 256) / 4, (0.5 + 4 / 64) / 4]
    assert all(a > b for a, b in pairwise(nbytes))
