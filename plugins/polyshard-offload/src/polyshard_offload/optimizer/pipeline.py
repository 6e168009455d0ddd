"""Chunks streamed through a few buffers: read ahead, visit, write behind.

[Note: lanes]
Each buffer is a lane with a thread of its own that does what is asked of the buffer in order: read
chunk k, (be visited), write chunk k, read chunk k + lanes. While chunk k is visited, the chunks
after it are read and the one before it is written, and a buffer is never overwritten before its
write has ended: that is the order of its lane. How long any transfer takes changes nothing else.

Every run reads anew, also what a lane still holds from the run before: between steps users write to
what is kept, in ways that leave no trace (``.data``, foreach operations on ``DTensor`` s).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyshard.memory.streams import NO_PRIORITY, launched, streams_of
from polyshard_offload.tiers.host_memory import Slab
from polyshard_offload.tiers.state_store import Extent, Store


@dataclass(frozen=True)
class Job:
    """One chunk of a run; ``key`` names it among the others."""

    key: int
    extents: tuple[Extent, ...]
    reads: bool = True
    writes: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of buffer it takes."""
        return sum(extent.nbytes for extent in self.extents)

    def read_only(self) -> Job:
        """The same chunk, only to be looked at."""
        return replace(self, writes=False)


@dataclass(eq=False)
class Lane:
    """One buffer and the thread that moves data in and out of it. See [Note: lanes]."""

    store: Store
    buffer: Tensor
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    loading: Future[None] | None = None
    saving: Future[None] | None = None
    stream: Any = None

    def load(self, job: Job) -> None:
        """Have the chunk in the buffer by the time :meth:`ready` returns."""
        self.loading = None
        if job.reads:
            part = self.buffer[: job.nbytes]
            self.loading = self._submit(partial(self.store.load, job.extents, part))

    def ready(self) -> None:
        """Wait for what was asked of the lane last; raises what it met."""
        for future in (self.saving, self.loading):
            if future is not None:
                future.result()
        self.loading = self.saving = None

    def save(self, job: Job) -> None:
        """Write the chunk behind the caller's back."""
        if not job.writes:
            return
        source = self.buffer[: job.nbytes]
        self.saving = self._submit(partial(self.store.save, job.extents, source))

    def _submit(self, move: Callable[[], None]) -> Future[None]:
        """Have the thread do ``move``, behind what was launched so far; it ends with its copies.

        A thread has current streams of its own, which nothing else waits for. So it uses a stream
        of the buffer's, and the host waits for both ends.
        """
        device = self.buffer.device
        before, streams = launched(device), streams_of(device)
        if streams is not None and self.stream is None:
            self.stream = streams.new(NO_PRIORITY)
        block = nullcontext() if streams is None else streams.on(self.stream)

        def moved() -> None:
            before()
            with block:
                move()
                launched(device)()

        return self.executor.submit(moved)

    def settle(self) -> None:
        """Wait without raising: for the way out of an error."""
        for future in (self.saving, self.loading):
            if future is not None:
                with suppress(Exception):
                    future.result()
        self.loading = self.saving = None


class Stream:
    """Jobs of one run, visited in order. See [Note: lanes]."""

    def __init__(self, lanes: Sequence[Lane], jobs: Sequence[Job]) -> None:
        """Begin to load the first jobs, one in each of ``lanes``."""
        self._lanes = lanes
        self._jobs = jobs
        self._index = 0
        for lane, job in zip(lanes, jobs, strict=False):
            lane.load(job)

    def advance(self, visit: Callable[[Tensor], None]) -> None:
        """Call ``visit`` with the next job's bytes; write them and read on behind its back."""
        job = self._jobs[self._index]
        lane = self._lanes[self._index % len(self._lanes)]
        lane.ready()
        visit(lane.buffer[: job.nbytes])
        lane.save(job)
        following = self._index + len(self._lanes)
        if following < len(self._jobs):
            lane.load(self._jobs[following])
        self._index += 1

    def finish(self) -> None:
        """Wait until everything is written."""
        for lane in self._lanes:
            lane.ready()


class Pipeline:
    """Streams chunks of a store through ``lanes`` buffers of ``device``."""

    def __init__(self, store: Store, device: torch.device, lanes: int) -> None:
        """Buffers are made by the first run; they stay, since fresh memory costs page faults."""
        self._store = store
        self._device = device
        self._count = lanes
        self._lanes: list[Lane] = []
        self.buffer_bytes = 0

    def __del__(self) -> None:
        for lane in self._lanes:
            lane.executor.shutdown(wait=False)

    def run(self, jobs: Sequence[Job], visit: Callable[[int, Tensor], None]) -> None:
        """Call ``visit(index, buffer)`` for every job in order.

        Args:
            jobs: the chunks.
            visit: gets the chunk's bytes (``[nbytes]`` uint8) and may change them.

        Raises:
            Whatever a transfer or ``visit`` raises, after all transfers have ended.
        """
        stream = self.stream(jobs)
        try:
            for index in range(len(jobs)):
                stream.advance(partial(visit, index))
            stream.finish()
        except BaseException:
            self.settle()
            raise

    def stream(self, jobs: Sequence[Job]) -> Stream:
        """The same, one job at a time whenever the caller likes; reading ahead begins now.

        Only one may be in use; after an error, or to leave it half way, call :meth:`settle`.
        """
        if not jobs:
            return Stream((), ())
        self._make_room(max(job.nbytes for job in jobs), min(self._count, len(jobs)))
        return Stream(self._lanes, jobs)

    def settle(self) -> None:
        """Wait for all transfers without raising."""
        for lane in self._lanes:
            lane.settle()

    def _make_room(self, nbytes: int, count: int) -> None:
        if self._lanes and nbytes <= self._lanes[0].buffer.numel() and count <= len(self._lanes):
            return
        for lane in self._lanes:
            lane.executor.shutdown()
        self._lanes = []  # the old buffers go before new ones come
        self._lanes = [Lane(self._store, self._buffer(nbytes)) for _ in range(count)]
        self.buffer_bytes = count * nbytes

    def _buffer(self, nbytes: int) -> Tensor:
        if self._device.type == "cpu":
            return Slab.of_host(max(nbytes, 1), pinned=False).lease(0, nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
