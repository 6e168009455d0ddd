"""Elements of a tensor whose bytes lie row by row in a file, in pieces of bounded size.

A view is a tensor on the meta device whose strides and offset count elements of the file's tensor.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from polyshard.errors import CheckpointError
from polyshard_checkpoint.safetensors.header import Stored

BLOCK_BYTES = 16 << 20
"""The most that is between a tensor and its file at one time."""
READERS = 4
"""Threads that read at once: storage works on while one of them copies."""
SHORT_BYTES = 256
"""Elements that lie together in fewer bytes are not read one by one, but with those between."""
LONG_BYTES = 1 << 18
"""Elements in several places of fewer bytes each are read ahead; beyond others ranks read."""


def in_blocks(most_elements: int, *alike: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same boxes of tensors of one shape, of at most so many elements; none if they are empty.

    Together they are the tensors, in the order of their elements.
    """
    first = alike[0]
    if first.numel() <= most_elements:
        if first.numel():
            yield alike
        return
    dim = next(dim for dim, size in enumerate(first.shape) if size > 1)
    half = first.shape[dim] // 2
    for start, length in ((0, half), (half, first.shape[dim] - half)):
        yield from in_blocks(most_elements, *(each.narrow(dim, start, length) for each in alike))


def runs(view: Tensor) -> tuple[int, Iterator[int]]:
    """How many elements of ``view`` lie together in the file, and where each such run begins."""
    length, inner = 1, view.ndim
    while inner:
        size, stride = view.shape[inner - 1], view.stride(inner - 1)
        if size != 1 and stride != length:
            break
        length *= size
        inner -= 1
    outer = list(zip(view.shape[:inner], view.stride()[:inner], strict=True))
    places = itertools.product(*(range(0, size * stride, stride) for size, stride in outer))
    return length, (int(view.storage_offset()) + sum(place) for place in places)


def memory_of(content: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    # Not flatten(): dims of one index keep what stride they have.
    flat = content.as_strided((content.numel(),), (1,), content.storage_offset())
    plain: Any = flat.view(torch.uint8).numpy()
    return memoryview(plain).cast("B")


def fill(target: Tensor, view: Tensor, stored: Stored, file: int) -> None:
    """Read the elements of ``view`` into ``target`` (of its shape), and convert them.

    What lies together in the file, and in memory of the same dtype, is read to its place.

    Raises:
        CheckpointError: when the file is too short.
    """
    target, view = _in_order_of_file(target, view)
    _expect(view, file)
    if _is_plain(target, stored.dtype) and not _is_scattered(view):
        _each_run(memory_of(target), view, stored, lambda part, place: _read(file, part, place))
        return
    most = max(1, BLOCK_BYTES // READERS // stored.dtype.itemsize)
    for part, where in in_blocks(most, target, view):
        part.copy_(_read_block(where, stored, file))


def _expect(view: Tensor, file: int) -> None:
    """Tell the kernel whether what follows the elements of ``view`` will be read."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        length, _ = runs(view)
        is_parted = length < view.numel() and length * view.itemsize < LONG_BYTES
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_NORMAL if is_parted else os.POSIX_FADV_RANDOM)


def _is_plain(target: Tensor, dtype: torch.dtype) -> bool:
    on_host = target.device.type == "cpu" and target.dtype == dtype
    return on_host and target.is_contiguous() and bool(target.numel())


def _is_scattered(view: Tensor) -> bool:
    length, _ = runs(view)
    return length < view.numel() and length * view.itemsize < SHORT_BYTES


def _read_block(view: Tensor, stored: Stored, file: int) -> Tensor:
    size = stored.dtype.itemsize
    span = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    if _is_scattered(view):
        if span * size > BLOCK_BYTES:
            content = torch.empty(tuple(view.shape), dtype=stored.dtype, device="cpu")
            for part, where in in_blocks(-(-view.numel() // 2), content, view):
                part.copy_(_read_block(where, stored, file))
            return content
        near = torch.empty(span, dtype=stored.dtype, device="cpu")
        _read(file, memory_of(near), stored.begin + int(view.storage_offset()) * size)
        return near.as_strided(tuple(view.shape), view.stride())
    content = torch.empty(tuple(view.shape), dtype=stored.dtype, device="cpu")
    _each_run(memory_of(content), view, stored, lambda part, place: _read(file, part, place))
    return content


def put(value: Tensor, view: Tensor, stored: Stored, file: int) -> None:
    """Write ``value``, converted, to where the elements of ``view`` (of its shape) belong."""
    value, view = _in_order_of_file(value, view)
    for part, where in in_blocks(max(1, BLOCK_BYTES // stored.dtype.itemsize), value, view):
        content = part.to(device="cpu", dtype=stored.dtype).contiguous()
        _each_run(memory_of(content), where, stored, lambda part, place: _write(file, part, place))


def _in_order_of_file(value: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
    order = sorted(range(view.ndim), key=lambda dim: -view.stride()[dim])
    return value.permute(order), view.permute(order)


def _each_run(
    memory: memoryview, view: Tensor, stored: Stored, move: Callable[[memoryview, int], None]
) -> None:
    size = stored.dtype.itemsize
    length, starts = runs(view)
    for index, start in enumerate(starts):
        begin = index * length * size
        move(memory[begin : begin + length * size], stored.begin + start * size)


def _read(file: int, memory: memoryview, place: int) -> None:
    while memory:
        count = os.preadv(file, [memory], place)
        if count == 0:
            raise CheckpointError("a safetensors file became shorter while it was read")
        memory, place = memory[count:], place + count


def _write(file: int, memory: memoryview, place: int) -> None:
    while memory:
        count = os.pwrite(file, memory, place)
        memory, place = memory[count:], place + count


def whole_view(stored: Stored) -> Tensor:
    """All elements of a file's tensor."""
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def boxed(view: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """A box of ``view``."""
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        view = view.narrow(dim, start, length)
    return view
