"""What only these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polyshard_testing import World


class SpareWorld(World):
    """Ranks take their environment along whenever they start."""

    def _start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("POLYSHARD_MOVE_PAGES", "0")
            patch.setenv("MALLOC_MMAP_THRESHOLD_", str(256 << 10))
            patch.setenv("MALLOC_ARENA_MAX", "1")  # holes of one heap, not of one for every thread
            super()._start()


@pytest.fixture(scope="session")
def spare_world() -> Iterator[World]:
    """Two ranks for tests that bring them to the limit of their memory.

    Their unsharded buffers are allocated, not reserved (reserving counts against limits as well),
    what is freed goes back at once, and a rank gives its peers up after eight seconds.
    """
    # malloc reads its settings when a process begins, so these begin anew, not from a fork server
    world = SpareWorld(2, collective_seconds=8, start_method="spawn")
    yield world
    world.close()
