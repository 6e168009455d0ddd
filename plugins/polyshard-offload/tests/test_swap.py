"""Swap files: what they keep, what they leave behind, and what a failing disk looks like."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyshard_offload import CorruptedError, DiskSettings, StorageError
from polyshard_offload.blocks import Calls
from polyshard_offload.memory import Arena, Slab
from polyshard_offload.store import DiskStore, Extent, HostStore, Store
from polyshard_offload.swap import PREFIX, SwapFile

BLOCK = 8192


def swap(path: Path, calls: Calls | None = None, **chosen: Any) -> SwapFile:
    return SwapFile(DiskSettings(path=path, block_bytes=BLOCK, **chosen), "things", 3, calls)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def aligned(values: torch.Tensor) -> torch.Tensor:
    memory = Slab.of_host(max(values.numel(), 1), pinned=False).lease(0, values.numel())
    return memory.copy_(values)


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
from polyshard_offload.swap import SwapFile
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
            (held,) = (link for link in links if PREFIX in link)
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
        folder.mkdir()
        (folder / "swap").touch()
    swap(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, other])


# Faults ---------------------------------------------------------------------------------------


class Faulty:
    """System calls that go wrong now and then."""

    def __init__(self, answer: Callable[[int], int | None]) -> None:
        """``answer(n)`` for call ``n`` (from 0): at most so many bytes, or raise."""
        self.count = 0
        self._answer = answer

    def _limit(self, memories: Sequence[memoryview]) -> list[memoryview]:
        self.count += 1
        limit = self._answer(self.count - 1)
        return [memories[0][:limit] if limit else memories[0]]

    def preadv(self, descriptor: int, memories: Sequence[memoryview], offset: int) -> int:
        return os.preadv(descriptor, self._limit(memories), offset)

    def pwritev(self, descriptor: int, memories: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(descriptor, self._limit(memories), offset)


def raising(number: int) -> Callable[[int], int | None]:
    def answer(count: int) -> int | None:
        raise OSError(number, os.strerror(number))

    return answer


def test_short_and_interrupted_transfers_go_on(tmp_path: Path) -> None:
    def answer(count: int) -> int | None:
        if count % 3 == 1:
            raise InterruptedError(errno.EINTR, "interrupted")
        return 4096 if count % 3 == 2 else None

    faulty = Faulty(answer)
    file = swap(tmp_path, Calls(preadv=faulty.preadv, pwritev=faulty.pwritev))
    offset, values = file.allocate(9 * BLOCK), aligned(noise(9 * BLOCK))
    file.write(offset, values)
    target = aligned(torch.zeros_like(values))
    file.read(offset, target)
    assert torch.equal(target, values)
    assert faulty.count > 18


def test_short_direct_reads_go_on_at_a_page(tmp_path: Path) -> None:
    """The kernel may stop anywhere; direct I/O may not start anywhere."""

    class Short:
        def preadv(self, descriptor: int, memories: Sequence[memoryview], offset: int) -> int:
            assert offset % 4096 == 0
            done = os.preadv(descriptor, memories, offset)
            return min(done, 5000)

    file = swap(tmp_path, Calls(preadv=Short().preadv))
    if not file.direct:
        pytest.skip("the file system refuses direct I/O")
    offset, values = file.allocate(4 * BLOCK), aligned(noise(4 * BLOCK))
    file.write(offset, values)
    target = aligned(torch.zeros_like(values))
    file.read(offset, target)
    assert torch.equal(target, values)


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    file = swap(tmp_path, Calls(preadv=lambda *a: 0))
    with pytest.raises(StorageError, match=r"rank 3: reading things at byte 4096 below .*end of"):
        file.read(file.allocate(BLOCK), noise(BLOCK))


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EIO, "last checkpoint"), (errno.ENOSPC, "Free some space")],
)
def test_errors_say_who_what_where(tmp_path: Path, number: int, hint: str) -> None:
    file = swap(tmp_path)
    offset = file.allocate(5 * BLOCK)
    faulty = Faulty(raising(number))
    file._blocks._calls = Calls(preadv=faulty.preadv, pwritev=faulty.pwritev)  # type: ignore[attr-defined]
    for move in (file.read, file.write):
        with pytest.raises(StorageError, match=f"rank 3: .*things.*{tmp_path}.*{hint}") as caught:
            move(offset, noise(5 * BLOCK))
        assert caught.value.errno == number


def test_a_full_disk_is_found_when_reserving(tmp_path: Path) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if nbytes > 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = swap(tmp_path, Calls(fallocate=full))
    with pytest.raises(StorageError, match=r"reserving 1048576 bytes for things .*Free some space"):
        file.allocate(1 << 20)


def test_more_than_the_disk_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="reserving"):
        swap(tmp_path).allocate(1 << 50)


def test_a_missing_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Create the directory first"):
        swap(tmp_path / "nowhere")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="this user can write"):
        swap(tmp_path)


def test_a_read_only_file_system_says_so() -> None:
    """Where even root cannot write."""
    with pytest.raises(StorageError, match=r"DiskSettings\(path=\.\.\.\)|kernel's log"):
        swap(Path("/proc"))


def test_refused_direct_transfers_fall_back(tmp_path: Path) -> None:
    """Some file systems take the flag and refuse the transfer."""

    def answer(count: int) -> int | None:
        if count == 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return None

    faulty = Faulty(answer)
    file = swap(tmp_path, Calls(pwritev=faulty.pwritev))
    assert not file.direct
    offset, values = file.allocate(BLOCK + 5), noise(BLOCK + 5)
    file.write(offset, values)
    target = torch.zeros_like(values)
    file.read(offset, target)
    assert torch.equal(target, values)


def test_refused_direct_transfers_are_errors_where_demanded(tmp_path: Path) -> None:
    faulty = Faulty(raising(errno.EINVAL))
    with pytest.raises(StorageError, match=r"Try DiskSettings\(direct=False\)"):
        swap(tmp_path, Calls(pwritev=faulty.pwritev), direct=True)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory here")
def test_a_file_system_in_memory_works() -> None:
    file = swap(Path("/dev/shm"))
    offset, values = file.allocate(3 * BLOCK + 1), noise(3 * BLOCK + 1)
    file.write(offset, values)
    target = torch.zeros_like(values)
    file.read(offset, target)
    assert torch.equal(target, values)


def test_a_changed_page_is_found(tmp_path: Path) -> None:
    file = swap(tmp_path, checksums=True)
    store = DiskStore(file)
    extents = [store.allocate(BLOCK), store.allocate(BLOCK)]
    store.save(extents, aligned(noise(2 * BLOCK)))
    target = aligned(torch.zeros(2 * BLOCK, dtype=torch.uint8))
    store.load(extents, target)
    page = noise(4096, 5)
    file.write(extents[1].offset, aligned(page))
    store.load(extents[:1], target[:BLOCK])
    with pytest.raises(CorruptedError, match=f"rank 3: things at byte {extents[1].offset}"):
        store.load(extents, target)


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
    from polyshard_offload.pipeline import Job, Pipeline

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
    from polyshard_offload.pipeline import Job, Pipeline

    class Broken(HostStore):
        def save(self, extents: Sequence[Extent], source: torch.Tensor) -> None:
            raise StorageError("no")

    store = Broken(Arena())
    jobs = [Job(i, (store.allocate(4096),)) for i in range(5)]
    pipeline = Pipeline(store, torch.device("cpu"), 3)
    for _ in range(2):
        with pytest.raises(StorageError, match="no"):
            pipeline.run(jobs, lambda index, buffer: None)
    assert [lane.holds for lane in pipeline._lanes] == [None] * 3


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
    """The first page, as somebody reads it who found the file in ``/proc``."""
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
