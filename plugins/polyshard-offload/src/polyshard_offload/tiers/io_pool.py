"""The threads that move blocks, and the aligned memory each of them keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from torch import Tensor

from polyshard_offload.tiers.host_memory import Slab, pages


class IOPool:
    """A few threads, shared by all files of a rank.

    Direct I/O needs page-aligned memory. A thread that is given other memory (torch aligns to 64
    bytes, devices have none that the kernel reads) goes through a block of its own.
    ``bounce_bytes`` is what those blocks take.
    """

    def __init__(self, threads: int, block_bytes: int) -> None:
        """Threads and blocks are made when first needed."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="polyshard-disk")
        self._block_bytes = block_bytes
        self._own = threading.local()
        self.bounce_bytes = 0

    def __del__(self) -> None:
        self._executor.shutdown(wait=False)

    def run(self, move: Callable[[int, Tensor], None], parts: Sequence[tuple[int, Tensor]]) -> None:
        """Call ``move`` for every part, several at a time; returns when all have ended.

        Raises:
            The first error, after all have ended: no thread touches the memory any more.
        """
        futures = [self._executor.submit(move, *part) for part in parts]
        wait(futures)
        for future in futures:
            future.result()

    def bounce(self, nbytes: int) -> Tensor:
        """At least ``nbytes`` (a block at most) of this thread's aligned memory, in whole pages."""
        block: Tensor | None = getattr(self._own, "block", None)
        if block is None:
            block = Slab.of_host(self._block_bytes, pinned=False).lease(0, self._block_bytes)
            self._own.block = block
            self.bounce_bytes += self._block_bytes
        return block[: pages(nbytes)]
