"""Swap files: what they keep, what they leave behind, and what a failing disk looks like."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from swap_toys import BLOCK, aligned, noise, swap

from polyshard_offload import StorageError
from polyshard_offload.tiers.host_memory import Arena
from polyshard_offload.tiers.nameless import PREFIX
from polyshard_offload.tiers.state_store import DiskStore, Extent, HostStore, Store
from polyshard_offload.tiers.swap_file import SwapFile


@pytest.mark.parametrize("direct", [True, False, "auto"])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000, 3 * BLOCK, 5 * BLOCK + 17])
def test_what_is_written_is_read(tmp_path: Path, direct: object, nbytes: int) -> None:
    """Whatever the size, from memory that suits direct I/O and memory that does not."""
    file = swap(tmp_path, direct=direct)
    values = noise(nbytes)
    for source in (values, aligned(values)):
        offset = file.allocate(nbytes)
        file.write(offset, source)
        for target in (torch.zeros_like(values), aligned(torch.zeros_like(values))):
            file.read(offset, target)
            assert torch.equal(target, values)
        assert torch.equal(file.window(offset, nbytes), values)


def test_windows_and_transfers_show_the_same(tmp_path: Path) -> None:
    """Writes through a window are read, writes past it are seen; past the page cache as well."""
    file = swap(tmp_path)
    offset = file.allocate(BLOCK)
    window = file.window(offset, BLOCK)
    for seed in range(4):
        window.copy_(noise(BLOCK, seed))
        target = aligned(torch.zeros(BLOCK, dtype=torch.uint8))
        file.read(offset, target)
        assert torch.equal(target, noise(BLOCK, seed))
        file.write(offset, aligned(noise(BLOCK, 100 + seed)))
        assert torch.equal(window, noise(BLOCK, 100 + seed))


@given(sizes=st.lists(st.integers(0, 20_000), max_size=6), on_disk=st.booleans())
@example(sizes=[0, 1], on_disk=False)
@example(sizes=[0, 1], on_disk=True)
@settings(max_examples=20, deadline=None)
def test_stores_keep_records_apart(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], on_disk: bool
) -> None:
    """Many records in one transfer, or one by one: each keeps what it was given."""
    store: Store = HostStore(Arena())
    if on_disk:
        store = DiskStore(swap(tmp_path_factory.mktemp("swap")))
    extents = [store.allocate(size) for size in sizes]
    total = sum(e.nbytes for e in extents)
    values = aligned(noise(total))
    store.save(extents, values)
    start = 0
    for extent in extents:
        alone = aligned(torch.zeros(extent.nbytes, dtype=torch.uint8))
        store.load([extent], alone)
        assert torch.equal(alone, values[start : start + extent.nbytes])
        assert torch.equal(store.window(extent), alone)
        start += extent.nbytes
    back = aligned(torch.zeros(total, dtype=torch.uint8))
    store.load(list(reversed(extents)), back)
    assert torch.equal(back.sort().values, values.sort().values)


def test_files_have_no_names(tmp_path: Path) -> None:
    file = swap(tmp_path)
    file.write(file.allocate(BLOCK), noise(BLOCK))
    assert list(tmp_path.iterdir()) == []


HOLDERS = """
import os, sys, time, torch
from polyshard_offload import DiskSettings
from polyshard_offload.tiers.swap_file import SwapFile
from pathlib import Path

def say(*words):
    # One write: print() makes several when Python's output is unbuffered, and they interleave.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def hold():
    file = SwapFile(DiskSettings(path=Path(sys.argv[1])), "things", 0)
    file.write(file.allocate(1 << 20), torch.ones(1 << 20, dtype=torch.uint8))
    say(os.getpid())
    time.sleep(60)

torch.set_num_threads(1)
for _ in range(3):  # one process after another would import torch three times
    if os.fork() == 0:
        hold()
        sys.exit()
for _ in range(3):
    pid, status = os.wait()
    say(pid, os.waitstatus_to_exitcode(status))
"""


def test_nothing_is_left_after_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDERS, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        holders = [int(process.stdout.readline()) for _ in range(3)]
        signals = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
        for holder, number in zip(holders, signals, strict=True):
            links = [os.readlink(link) for link in Path(f"/proc/{holder}/fd").iterdir()]
            (held,) = (link for link in links if link.startswith(str(tmp_path)))
            assert held.endswith("(deleted)")  # the kernel frees it with the last descriptor
            os.kill(holder, number)
            assert process.stdout.readline().split() == [str(holder), str(-number)]
            assert list(tmp_path.iterdir()) == []


def test_a_start_removes_what_a_kill_left(tmp_path: Path) -> None:
    """A kill between making the directory and removing it; the living are left alone."""
    import socket

    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = tmp_path / f"{PREFIX}{socket.gethostname()}-{process.pid}-abc"
    alive = tmp_path / f"{PREFIX}{socket.gethostname()}-{os.getpid()}-abc"
    other = tmp_path / f"{PREFIX}elsewhere-{process.pid}-abc"
    for folder in (dead, alive, other):
        folder.mkdir(mode=0o700)
        (folder / "swap").touch()
    swap(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, other])


def test_arenas_take_few_slabs_and_back_what_is_dropped() -> None:
    arena = Arena()
    first = [arena.take(5000) for _ in range(10)]
    assert {t.data_ptr() % 4096 for t in first} == {0}
    assert arena.taken_bytes == arena.peak_bytes == 10 * 8192
    kept = first[0][10:20]
    addresses = {t.data_ptr() for t in first}
    del first
    assert arena.taken_bytes == 8192  # a view is enough to keep the memory
    again = [arena.take(5000) for _ in range(9)]
    assert {t.data_ptr() for t in again} == addresses - {kept.data_ptr() - 10}
    assert arena.peak_bytes == 10 * 8192


def test_lanes_wait_for_each_other(tmp_path: Path) -> None:
    """However long transfers take, each visit sees what the visit before left."""
    from polyshard_offload.optimizer.pipeline import Job, Pipeline

    generator = torch.Generator().manual_seed(0)

    class Slow(HostStore):
        def load(self, extents: Sequence[Extent], target: torch.Tensor) -> None:
            time.sleep(float(torch.rand((), generator=generator)) * 0.003)
            super().load(extents, target)

        def save(self, extents: Sequence[Extent], source: torch.Tensor) -> None:
            time.sleep(float(torch.rand((), generator=generator)) * 0.003)
            super().save(extents, source)

    class Visit:
        def __init__(self, turn: int, order: list[Job], seen: list[int]) -> None:
            self.turn, self.order, self.seen = turn, order, seen

        def __call__(self, index: int, buffer: torch.Tensor) -> None:
            assert buffer.eq(self.turn).all()
            buffer.add_(1)
            self.seen.append(self.order[index].key)

    for lanes in (1, 2, 3, 6):
        store = Slow(Arena())
        extents = [store.allocate(4096 * (1 + i % 3)) for i in range(11)]
        for extent in extents:
            store.window(extent).zero_()
        pipeline = Pipeline(store, torch.device("cpu"), lanes)
        jobs = [Job(i, (e,)) for i, e in enumerate(extents)]
        seen: list[int] = []
        for turn in range(6):
            order = jobs[::-1] if turn % 2 else jobs

            pipeline.run(order, Visit(turn, order, seen))
        assert sorted(seen) == sorted(list(range(11)) * 6)
        for extent in extents:
            assert store.window(extent).eq(6).all()


def test_an_error_in_a_lane_is_raised_once_all_have_ended() -> None:
    from polyshard_offload.optimizer.pipeline import Job, Pipeline

    class Broken(HostStore):
        def save(self, extents: Sequence[Extent], source: torch.Tensor) -> None:
            raise StorageError("no")

    store = Broken(Arena())
    jobs = [Job(i, (store.allocate(4096),)) for i in range(5)]
    pipeline = Pipeline(store, torch.device("cpu"), 3)
    for _ in range(2):
        with pytest.raises(StorageError, match="no"):
            pipeline.run(jobs, lambda index, buffer: None)
    assert [lane.saving for lane in pipeline._lanes] == [None] * 3


def test_memory_that_was_moved_can_still_be_resized(tmp_path: Path) -> None:
    """Staging memory comes and goes between transfers."""
    file = swap(tmp_path, direct=False)
    offset, values = file.allocate(BLOCK), noise(BLOCK)
    for _ in range(2):
        file.write(offset, values)
        file.read(offset, values)
        values.untyped_storage().resize_(0)
        values.untyped_storage().resize_(BLOCK)


def header_of(file: SwapFile) -> dict[str, Any]:
    """The first page, as read by a process that found the file in ``/proc``."""
    link = Path(f"/proc/{os.getpid()}/fd/{file.descriptor}")
    with link.open("rb") as found:
        facts: dict[str, Any] = json.loads(found.read(4096).rstrip(b"\0"))
    return facts


def test_the_first_page_says_what_is_kept(tmp_path: Path) -> None:
    headers = []
    for last in (5000, 5000, 3000):
        file = swap(tmp_path)
        empty = header_of(file)
        assert (empty["holds"], empty["rank"], empty["world_size"]) == ("things", 3, 1)
        assert empty["pid"] == os.getpid()
        assert empty["bytes"] == {}
        file.allocate(BLOCK, {torch.float32: 8000, torch.int64: 16})
        offset = file.allocate(last, {torch.float32: last})
        values = noise(last)
        file.write(offset, values)
        headers.append(header_of(file))
        assert headers[-1]["bytes"] == {"float32": 8000 + last, "int64": 16}
        assert headers[-1]["plan"] != empty["plan"]
        target = torch.zeros_like(values)
        file.read(offset, target)
        assert torch.equal(target, values)
    assert headers[0] == headers[1]
    assert headers[0]["plan"] != headers[2]["plan"]
