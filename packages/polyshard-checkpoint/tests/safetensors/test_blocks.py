"""Which bytes of a file belong to which elements, in whatever order they are wanted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyshard_checkpoint.safetensors import blocks
from polyshard_checkpoint.safetensors.blocks import fill, in_blocks, memory_of, put, runs
from polyshard_checkpoint.safetensors.header import Stored


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    """A shape, and how to cut and turn tensors of it."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    cuts = []
    for size in shape:
        begin = draw(st.integers(0, size))
        cuts.append(slice(begin, begin + draw(st.integers(0, size - begin))))
    order = draw(st.permutations(range(len(shape))))
    return shape, lambda tensor: tensor[tuple(cuts)].permute(order)


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.int16) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def on_meta(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.int16, device="meta")


@given(views())
def test_runs_are_the_elements_in_order(drawn: tuple[tuple[int, ...], Any]) -> None:
    shape, cut = drawn
    length, starts = runs(cut(on_meta(shape)))
    found = [i for start in starts for i in range(start, start + length)]
    if cut(numbered(shape)).numel():
        assert found == cut(numbered(shape)).flatten().tolist()


@given(views(), st.integers(1, 9))
def test_splitting_loses_nothing(drawn: tuple[tuple[int, ...], Any], most: int) -> None:
    shape, cut = drawn
    whole = cut(numbered(shape))
    parts = [part for (part,) in in_blocks(most, whole)]
    assert all(0 < part.numel() <= most for part in parts)
    assert [i for part in parts for i in part.flatten().tolist()] == whole.flatten().tolist()


@pytest.fixture(params=[1, 64, 16 << 20])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("short", [0, 256])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_what_is_read_and_written_are_those_elements(
    tmp_path: Path, short: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SHORT_BYTES", short)
    path = tmp_path / "file"

    @given(views())
    def check(drawn: tuple[tuple[int, ...], Any]) -> None:
        shape, cut = drawn
        whole, stored = numbered(shape), Stored(torch.int16, torch.Size(shape), 7)
        path.write_bytes(bytes(7) + bytes(memory_of(whole)))
        file = os.open(path, os.O_RDWR)
        target = torch.zeros_like(cut(whole), dtype=dtype)
        fill(target, cut(on_meta(shape)), stored, file)
        assert torch.equal(target, cut(whole).to(dtype))
        put(-target, cut(on_meta(shape)), stored, file)
        os.close(file)
        cut(whole).neg_()
        assert path.read_bytes() == bytes(7) + bytes(memory_of(whole))

    check()
