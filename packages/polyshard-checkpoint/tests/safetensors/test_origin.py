"""Code that moves elements, run on tensors without values, says where each comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyshard.errors import CheckpointError
from polyshard_checkpoint.safetensors.origin import Traced, parts_within

SIZES = (1, 2, 3, 4, 6)


def value_of(traced: Traced, stored: dict[str, Tensor]) -> Tensor:
    """What it stands for; every element exactly once."""
    found = torch.full(traced.shape, -1)
    for piece in traced.pieces:
        view = piece.view
        part = found[tuple(slice(o, o + n) for o, n in zip(piece.offsets, view.shape, strict=True))]
        assert (part == -1).all(), "two pieces overlap"
        part.copy_(
            stored[piece.name]
            .flatten()
            .as_strided(view.shape, view.stride(), view.storage_offset())
        )
    assert (found >= 0).all(), "an element comes from nowhere"
    return found


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Callable[[Tensor], Tensor]]]:
    """A shape, and steps that move elements of it."""
    first = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    value, steps = torch.zeros(first), []
    for _ in range(draw(st.integers(0, 6))):
        step = draw(st.sampled_from(STEPS))(draw, value)
        value = step(value)
        if value.numel() > 500:
            break
        steps.append(step)
    return first, steps


def dim_of(draw: Any, value: Tensor) -> int:
    return int(draw(st.integers(-value.ndim, value.ndim - 1)))


def _transpose(draw: Any, value: Tensor) -> Callable[[Tensor], Tensor]:
    one, other = dim_of(draw, value), dim_of(draw, value)
    return lambda t: t.transpose(one, other).contiguous()


def _chunk(draw: Any, value: Tensor) -> Callable[[Tensor], Tensor]:
    dim = dim_of(draw, value)
    parts = len(value.chunk(2, dim))
    index = draw(st.integers(0, parts - 1))
    return lambda t: t.chunk(2, dim)[index].contiguous()


def _turn_round(draw: Any, value: Tensor) -> Callable[[Tensor], Tensor]:
    dim = dim_of(draw, value)
    return lambda t: torch.cat(t.chunk(3, dim)[::-1], dim)


def _stack(draw: Any, value: Tensor) -> Callable[[Tensor], Tensor]:
    dim = int(draw(st.integers(0, value.ndim)))
    return lambda t: torch.stack([t], dim)


def _unstack(draw: Any, value: Tensor) -> Callable[[Tensor], Tensor]:
    if value.ndim == 1:
        return lambda t: t
    dim = dim_of(draw, value)
    return lambda t: torch.cat(torch.unbind(t, dim), 0)


def _reshape(draw: Any, value: Tensor) -> Callable[[Tensor], Tensor]:
    left, shape = value.numel(), []
    while left > 1:
        size = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        shape.append(size)
        left //= size
        if len(shape) > 4:
            shape.append(left)
            break
    return lambda t: t.contiguous().reshape(shape or [1])


def _slice(draw: Any, value: Tensor) -> Callable[[Tensor], Tensor]:
    begin = draw(st.integers(0, value.shape[0] - 1))
    return lambda t: t[begin:, ...]


STEPS = [_transpose, _chunk, _turn_round, _stack, _unstack, _reshape, _slice]


@given(moves())
def test_steps_are_followed(drawn: tuple[tuple[int, ...], Any]) -> None:
    shape, steps = drawn
    real = torch.arange(torch.Size(shape).numel()).reshape(shape)
    traced: Any = Traced.stored("one", shape, torch.int64)
    stored = {"one": real}
    for step in steps:
        real, traced = step(real), step(traced)
    assert traced.shape == real.shape
    assert torch.equal(value_of(traced, stored), real)


@given(moves(), st.data())
def test_parts_in_a_box_are_those_elements(
    drawn: tuple[tuple[int, ...], Any], data: st.DataObject
) -> None:
    """Boxes of the stored tensor, laid side by side, have all of what was made of it."""
    shape, steps = drawn
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    real, traced = whole, Traced.stored("one", shape, torch.int64)
    made: Any = traced
    for step in steps:
        real, made = step(real), step(made)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    found = torch.full(made.shape, -1)
    for start, length in ((0, cut), (cut, shape[dim] - cut)):
        offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
        local = whole.narrow(dim, start, length)
        for piece in made.pieces:
            for begin, part in parts_within(piece, shape, offsets, local):
                place = found[
                    tuple(slice(o, o + n) for o, n in zip(begin, part.shape, strict=True))
                ]
                assert (place == -1).all(), "written twice"
                place.copy_(part)
    assert torch.equal(found, real)


def test_several_tensors_become_one_and_take_the_wider_dtype() -> None:
    parts: Any = [Traced.stored(f"e{i}", (2, 3), torch.bfloat16) for i in range(2)]
    other: Any = Traced.stored("last", (1, 2, 3), torch.float32)
    made: Any = torch.cat([torch.stack(parts), other])
    assert (made.shape, made.dtype) == ((3, 2, 3), torch.float32)
    assert [piece.name for piece in made.pieces] == ["e0", "e1", "last"]
    assert repr(made) == "Traced((3, 2, 3), torch.float32, of e0, e1, last)"


def test_arithmetic_is_refused() -> None:
    one: Any = Traced.stored("one", (4,), torch.float32)
    with pytest.raises(CheckpointError, match="computes with values"):
        one + 1
    with pytest.raises(CheckpointError, match="step 2"):
        one[::2]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([one.reshape(2, 2), one.reshape(4, 1)], dim=0)


def test_what_shares_memory_is_known() -> None:
    """Libraries count what shares a storage once, where they split models into files."""
    one: Any = Traced.stored("one", (4, 6), torch.float32)
    parts = one.chunk(2, dim=1)
    copies = [part.contiguous() for part in parts]
    storages = [t.like.untyped_storage() for t in (one, *parts, *copies)]
    assert len({storage._cdata for storage in storages}) == 3
    assert [storage.nbytes() for storage in storages] == [96, 96, 96, 48, 48]
