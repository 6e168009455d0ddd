"""Which bytes of a file belong to a box of elements."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from polyshard_checkpoint.safetensors.blocks import Block, memory_of, places, runs, split
from polyshard_checkpoint.safetensors.header import Stored


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Block]:
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    offsets, sizes = [], []
    for size in shape:
        begin = draw(st.integers(0, size))
        offsets.append(begin)
        sizes.append(draw(st.integers(0, size - begin)))
    return tuple(shape), Block(tuple(offsets), tuple(sizes))


def cut(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(block.offsets, block.sizes, strict=True))]


@given(boxes())
def test_runs_are_the_elements_in_order(box: tuple[tuple[int, ...], Block]) -> None:
    shape, block = box
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    length, starts = runs(block, shape)
    found = [i for start in starts for i in range(start, start + length)]
    if block.elements:
        assert found == cut(whole, block).flatten().tolist()


@given(boxes(), st.integers(1, 9))
def test_splitting_loses_nothing(box: tuple[tuple[int, ...], Block], most: int) -> None:
    shape, block = box
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    parts = list(split(block, most))
    assert all(0 < part.elements <= most for part in parts)
    found = [i for part in parts for i in cut(whole, part).flatten().tolist()]
    assert found == cut(whole, block).flatten().tolist()


@given(boxes())
def test_places_are_bytes_of_the_file(box: tuple[tuple[int, ...], Block]) -> None:
    shape, block = box
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    file = bytes(7) + bytes(memory_of(whole))
    target = torch.zeros(block.sizes, dtype=torch.int16)
    if not block.elements:
        return
    for view, place in places(memory_of(target), block, Stored(torch.int16, whole.shape, 7)):
        view[:] = file[place : place + len(view)]
    assert torch.equal(target, cut(whole, block))
