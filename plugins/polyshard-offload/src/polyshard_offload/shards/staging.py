"""Memory on the compute device that shards are brought into for a gather.

[Note: staging]
Transfers are bound to one tensor for life, whose memory is taken when a shard is fetched and given
back when the gather has read it. Views of it can be made only while it has memory, so asking for
the tensor gives it some; it goes again with the first release, or when the next one is asked.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyshard.memory.streams import Event, streams_of


@dataclass(eq=False)
class StagingState:
    """Staging memory of all shards together, in bytes, and the one whose views were just made.

    ``ahead`` lets one thread read the next shards while a step computes. ``gradient_moves`` counts
    shards of gradients that left the device; ``records_norms`` has their norms taken before.
    """

    bytes_now: int = 0
    gradient_moves: int = 0
    records_norms: bool = False
    peak_bytes: int = 0
    idle: Staging | None = None
    copied: list[Tensor] = field(default_factory=list)
    """Host memory that the device may still copy from or to."""
    ends: dict[Any, Event] = field(default_factory=dict)
    """By stream, the end of what was copied there."""
    ahead: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="polyshard-fetch")
    )

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream; what lies on the host is kept until :meth:`settle`."""
        target.copy_(source, non_blocking=True)
        host, device = (source, target) if source.device.type == "cpu" else (target, source)
        streams = streams_of(device.device)
        if streams is not None:
            self.copied.append(host)
            self.ends[streams.current()] = streams.mark()

    def settle(self) -> None:
        """Have the host wait for all copies: it may read what left, and write what came."""
        for end in self.ends.values():
            end.synchronize()
        self.ends.clear()
        self.copied.clear()

    def __del__(self) -> None:
        self.settle()  # else host memory could go while it is in use
        self.ahead.shutdown(wait=False)


class Staging:
    """Memory for one shard (``[numel]``) on the compute device. See [Note: staging]."""

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, state: StagingState
    ) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._storage.resize_(0)
        self._held = False
        self._state = state

    def acquire(self) -> None:
        """Take memory, unless it is held; contents are undefined."""
        if not self._held:
            self._storage.resize_(self._nbytes)
            self._held = True
            self._state.bytes_now += self._nbytes
            self._state.peak_bytes = max(self._state.peak_bytes, self._state.bytes_now)

    def release(self) -> None:
        """Give the memory back, if it is held."""
        if self._held:
            self._storage.resize_(0)
            self._held = False
            self._state.bytes_now -= self._nbytes

    def viewable(self) -> Tensor:
        """The tensor, in a state that lets views be made."""
        # In use: a thread may be reading into it, so it is not to be freed when another is asked.
        if self._held and self._state.idle is not self:
            return self.tensor
        idle, self._state.idle = self._state.idle, self
        if idle is not None and idle is not self:
            idle.release()
        self.acquire()
        return self.tensor

    def in_use(self) -> None:
        """Hold memory of the current stream until :meth:`release`, for all views."""
        if self._state.idle is self:  # made for views, by another stream
            self._state.idle = None
            self.release()
        self.acquire()
