"""Buffers whose memory comes and goes while their aliases stay."""

from __future__ import annotations

import gc
import io
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polyshard.memory.buffers import Buffer, HeapBuffer, MappedBuffer, Recycled, new_buffer
from polyshard.memory.own_storage import own_storage_of_gradient
from polyshard.memory.pages import EXTENT_BYTES, PagePool, PageRange, pages_can_move

mapped = pytest.mark.skipif(not pages_can_move(), reason="this kernel cannot move pages")
NUMEL = 3 * EXTENT_BYTES // 4 + 5


def make(kind: str) -> Buffer:
    if kind == "heap":
        return HeapBuffer(NUMEL, torch.float32, torch.device("cpu"))
    return MappedBuffer(NUMEL, torch.float32, PagePool())


@pytest.mark.parametrize("kind", ["heap", pytest.param("mapped", marks=mapped)])
def test_aliases_survive_release_and_refill(kind: str) -> None:
    buffer = make(kind)
    buffer.acquire()
    alias = buffer.tensor.view(-1)[1:].view(-1)
    leaf = torch.empty(0).set_(buffer.tensor.untyped_storage(), 0, (NUMEL,), (1,))
    version = leaf._version
    for value in (1.0, 2.0):
        buffer.acquire()
        buffer.acquire()  # a no-op
        buffer.tensor.fill_(value)
        assert alias[0] == alias[-1] == leaf[0] == value
        buffer.release()
        buffer.release()  # a no-op
    assert leaf._version == version, "refilling must not look like a change to autograd"


@mapped
def test_pages_wander_between_ranges_of_different_sizes() -> None:
    pool = PagePool()
    big = MappedBuffer(5 * EXTENT_BYTES // 4, torch.float32, pool)
    small = [MappedBuffer(2 * EXTENT_BYTES // 4, torch.float32, pool) for _ in range(2)]
    big.acquire()
    big.tensor.fill_(1.0)
    big.release()
    for buffer in small:
        buffer.acquire()
        buffer.tensor.fill_(2.0)
    big.acquire()  # one extent is its own still, the others are in use elsewhere
    big.tensor.fill_(3.0)
    assert all(bool((b.tensor == 2.0).all()) for b in small)
    assert bool((big.tensor == 3.0).all())


@mapped
def test_a_released_range_keeps_its_pages_if_nobody_took_them() -> None:
    pool = PagePool()
    buffer = MappedBuffer(NUMEL, torch.float32, pool)
    buffer.acquire()
    buffer.tensor.fill_(4.0)
    buffer.release()
    buffer.acquire()
    assert bool((buffer.tensor == 4.0).all())


@mapped
def test_a_dropped_range_can_be_offered_no_longer() -> None:
    pool = PagePool()
    gone = PageRange(EXTENT_BYTES)
    pool.fill(gone)
    pool.offer(gone)
    del gone
    gc.collect()
    wanted = PageRange(EXTENT_BYTES)
    pool.fill(wanted)
    tensor = wanted.tensor(4, torch.float32)
    tensor.fill_(1.0)
    assert tensor.sum() == 4.0


@mapped
def test_a_tensor_keeps_its_range_alive() -> None:
    tensor = PageRange(EXTENT_BYTES).tensor(EXTENT_BYTES // 4, torch.float32)
    gc.collect()
    tensor.fill_(5.0)
    assert tensor[-1] == 5.0


def test_small_buffers_come_from_the_heap() -> None:
    assert isinstance(new_buffer(8, torch.float32, torch.device("cpu"), PagePool()), HeapBuffer)
    assert isinstance(new_buffer(1 << 20, torch.float32, torch.device("cpu"), None), HeapBuffer)


def test_memory_is_recycled_once_nobody_holds_it() -> None:
    memory = Recycled()
    device = torch.device("cpu")
    first = memory.take(100, torch.float32, device)
    address = first.data_ptr()
    part = first[10:20]
    del first
    assert memory.take(100, torch.float32, device).data_ptr() != address, "a view holds it"
    address = memory.take(100, torch.float32, device).data_ptr()
    assert memory.take(100, torch.float32, device).data_ptr() == address
    assert memory.take(50, torch.float32, device).numel() == 50
    assert memory.take(50, torch.bfloat16, device).dtype == torch.bfloat16
    assert part.shape == (10,)


def test_memory_nobody_lives_in_is_given_up() -> None:
    memory = Recycled()
    device = torch.device("cpu")
    kept = memory.take(100, torch.float32, device)
    address = kept.data_ptr()
    memory.keep_only_if_used_by(kept)
    del kept
    assert memory.take(100, torch.float32, device).data_ptr() == address
    memory.keep_only_if_used_by(torch.empty(100))
    assert memory._memory is None
    memory.take(100, torch.float32, device)
    memory.drop()
    assert memory._memory is None


def lazily_free() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines():
        if line.startswith("LazyFree:"):
            return int(line.split()[1]) << 10
    pytest.skip("this kernel does not say what it may take")


@mapped
def test_recycled_memory_is_lent_and_taken_back() -> None:
    pool = PagePool()
    parameters = MappedBuffer(NUMEL, torch.float32, pool)
    parameters.acquire()
    parameters.tensor.fill_(1.0)
    parameters.release()
    memory = Recycled(pool)
    total = memory.take(NUMEL, torch.float32, torch.device("cpu"))
    assert True not in parameters._range.filled, "gradients took the pages"
    total.fill_(2.0)
    part = memory.parts_of(total)[0] = own_storage_of_gradient(total[:100])
    gradient, address = part.detach(), total.data_ptr()
    del total, part
    pool.recall()
    parameters.acquire()
    parameters.tensor.fill_(3.0)
    assert bool((gradient == 2.0).all()), "somebody holds a gradient"
    parameters.release()
    del gradient
    pool.recall()
    parameters.acquire()
    parameters.tensor.fill_(4.0)
    parameters.release()
    again = memory.take(NUMEL, torch.float32, torch.device("cpu"))
    assert again.data_ptr() == address
    again.fill_(5.0)
    assert memory.parts_of(again)[0][0] == 5.0


@mapped
def test_the_kernel_may_take_what_nobody_uses() -> None:
    pool = PagePool()
    used, unused = (MappedBuffer(NUMEL, torch.float32, pool) for _ in range(2))
    for buffer in (used, unused):
        buffer.acquire()
        buffer.tensor.fill_(6.0)
    unused.release()
    before = lazily_free()
    pool.lend()
    assert lazily_free() - before >= unused.nbytes
    assert bool((used.tensor == 6.0).all())
    unused.acquire()
    unused.tensor.fill_(7.0)
    assert bool((unused.tensor == 7.0).all())


ACCESSES: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda t: t.sum(),
    "elementwise": lambda t: t + 1,
    "matmul": lambda t: t[:4].view(2, 2) @ t[:4].view(2, 2),
    "item": lambda t: t[0].item(),
    "copy": lambda t: t.clone(),
    "write": lambda t: t.mul_(2),
    "foreach": lambda t: torch._foreach_add([t], 1),
    "numpy": lambda t: t.numpy().sum(),
    "save": lambda t: torch.save(t, io.BytesIO()),
    "print": repr,
}


@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("kind", ["heap", pytest.param("mapped", marks=mapped)])
def test_released_memory_is_not_read_as_zeros(kind: str, access: str) -> None:
    """Where torch's own, resized to nothing, raises or takes the process down."""
    buffer = make(kind)
    buffer.acquire()
    buffer.tensor.fill_(3.0)
    alias = torch.empty(0).set_(buffer.tensor.untyped_storage(), 0, (NUMEL,), (1,))
    buffer.release()
    assert alias.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match=r"data pointer|out of bounds"):
        ACCESSES[access](alias)
    buffer.acquire()
    buffer.tensor.fill_(4.0)
    assert alias.untyped_storage().nbytes() == NUMEL * 4
    ACCESSES[access](alias)


AT_EXIT = """
import torch
from polyshard.memory.buffers import MappedBuffer
from polyshard.memory.pages import PagePool

class Late:
    def __del__(self):
        print(self.tensor.sum().item())

buffer = MappedBuffer(1 << 20, torch.float32, PagePool())
buffer.acquire()
buffer.tensor.fill_(1.0)
late = Late()
late.tensor = buffer.tensor.view(-1)
late.itself = late
"""


@mapped
def test_tensors_outlive_the_interpreter() -> None:
    command = [sys.executable, "-c", AT_EXIT]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("", "1048576.0"), "collected late, or not at all"


def test_parts_handed_out_hold_memory_too() -> None:
    memory, device = Recycled(), torch.device("cpu")
    total = memory.take(100, torch.float32, device)
    address = total.data_ptr()
    assert memory.parts_of(torch.empty(100)) == {}, "other memory"
    memory.parts_of(total)[0] = own_storage_of_gradient(total[10:20])
    memory.parts_of(total)[1] = own_storage_of_gradient(total[20:20])
    kept = memory.parts_of(total)[0].detach()
    del total
    fresh = memory.take(100, torch.float32, device)
    assert fresh.data_ptr() != address, "somebody holds a part"
    assert memory.parts_of(fresh) == {}
    memory.parts_of(fresh)[0] = own_storage_of_gradient(fresh[10:20])
    address = fresh.data_ptr()
    given = memory.parts_of(fresh)[0].detach()
    del given, fresh
    again = memory.take(100, torch.float32, device)
    assert again.data_ptr() == address
    assert list(memory.parts_of(again)) == [0], "made once"
    assert kept.shape == (10,)


@pytest.mark.parametrize("shape", [(10,), (10, 1), (1, 10), (1, 1), ()])
def test_memory_of_parts_of_any_shape_is_taken_again(shape: tuple[int, ...]) -> None:
    memory, device = Recycled(), torch.device("cpu")
    addresses = set()
    with torch.no_grad():
        for _ in range(3):
            total = memory.take(100, torch.float32, device)
            addresses.add(total.data_ptr())
            parts = memory.parts_of(total)
            if not parts:
                parts[0] = own_storage_of_gradient(total[: math.prod(shape)].view(shape))
            gradient = parts[0].detach()
            del total, gradient
    assert len(addresses) == 1
