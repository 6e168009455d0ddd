"""Who is told of what moves beside gathers and reductions, and what tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from polyshard.seams import ShardStorage, overrides


class Watch(Protocol):
    """Hears of staging and of sums over replicas; times are the host's, in seconds."""

    def staged(self, direction: str, num_bytes: int, seconds: float) -> None:
        """A shard came from where it rests (``fetch``), or a gradient went there (``place``)."""
        ...

    def replicas_summed(self, payload_bytes: int, seconds: float) -> None:
        """Gradients were summed over replicas."""
        ...


def placing_in(storage: ShardStorage, watch: Watch | None) -> Callable[[Tensor], Tensor]:
    """The storage's ``place_gradient``, timed where somebody asks and there is something to do."""
    if watch is None or not overrides(storage.place_gradient, ShardStorage.place_gradient):
        return storage.place_gradient

    def place(gradient: Tensor) -> Tensor:
        begin = time.perf_counter()
        placed = storage.place_gradient(gradient)
        watch.staged("place", gradient.nbytes, time.perf_counter() - begin)
        return placed

    return place
