"""What a failing disk looks like: errors that say who, what and where, or no error at all."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from swap_toys import BLOCK, aligned, noise, swap

from polyshard_offload import CorruptedError, StorageError
from polyshard_offload.tiers.block_io import Calls
from polyshard_offload.tiers.state_store import DiskStore


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


def test_two_threads_may_be_refused_at_once(tmp_path: Path) -> None:
    """A file system that takes direct writes, and no direct reads."""
    both = threading.Barrier(2)

    def preadv(descriptor: int, memories: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            both.wait(60)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.preadv(descriptor, memories, offset)

    file = swap(tmp_path, Calls(preadv=preadv), io_threads=2)
    if not file.direct:
        pytest.skip("the file system refuses direct I/O")
    offset, values = file.allocate(2 * BLOCK), aligned(noise(2 * BLOCK))
    file.write(offset, values)
    target = aligned(torch.zeros_like(values))
    file.read(offset, target)
    assert torch.equal(target, values)
    assert not file.direct


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
