"""What a group has moved, and whoever watches it: one call per event of the life cycle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from polyshard.params.sharded import Shards
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import GroupIdentity, Observer, StepObserver, overrides


@dataclass
class Traffic:
    """What a group has moved so far on this rank, in bytes and calls."""

    sent_bytes: int = 0
    received_bytes: int = 0
    gathers: int = 0
    reductions: int = 0
    wait_seconds: float = 0.0


class Meter:
    """Counts a group's traffic and tells its observers; a loop over an empty tuple without any."""

    def __init__(self, group: GroupIdentity, observers: tuple[Observer, ...]) -> None:
        """``observers`` in plugin order, which hear of the group by its name."""
        self._group = group
        self.observers = observers
        self.step_observers = tuple(o for o in observers if isinstance(o, StepObserver))
        self.traffic = Traffic()

    def gather_started(self, sent_bytes: int) -> None:
        """Tell of an all-gather that has started."""
        for observer in self.observers:
            observer.on_unshard(self._group.text, sent_bytes)

    def gathered(self, wait_seconds: float) -> None:
        """Tell of the wait for unsharded parameters, which are ready."""
        for observer in self.observers:
            observer.on_unsharded(self._group.text, wait_seconds)

    def resharded(self) -> None:
        """Tell that the unsharded parameters were freed."""
        for observer in self.observers:
            observer.on_reshard(self._group.text)

    def reduction_started(self, sent_bytes: int) -> None:
        """Tell of a reduction that has started."""
        for observer in self.observers:
            observer.on_reduce(self._group.text, sent_bytes)

    def reduced(self, wait_seconds: float) -> None:
        """Tell of the wait for a reduction, which has ended."""
        for observer in self.observers:
            observer.on_reduced(self._group.text, wait_seconds)

    # For those who ask for more than counts ---------------------------------------------------

    @property
    def watch(self) -> Meter | None:
        """Itself, if anybody asks."""
        return self if self.step_observers else None

    def starting(self, what: str) -> None:
        """Tell that a ``"gather"`` or a ``"reduce"`` is about to start."""
        for observer in self.step_observers:
            observer.on_start(self._group.text, what)

    def fetching(self, shards: Shards) -> Callable[[], None]:
        """What fetches the shard, and tells of it where somebody asks and it rests elsewhere."""
        if not (self.step_observers and overrides(shards.storage.fetch, DeviceStorage.fetch)):
            return shards.fetch

        def fetch() -> None:
            begin = time.perf_counter()
            shards.fetch()
            num_bytes = shards.layout.shard_numel * shards.dtype.itemsize
            self.staged("fetch", num_bytes, time.perf_counter() - begin)

        return fetch

    def staged(self, direction: str, num_bytes: int, seconds: float) -> None:
        """Tell that a shard came from where it rests, or a gradient went there."""
        for observer in self.step_observers:
            observer.on_staged(self._group.text, direction, num_bytes, seconds)

    def replicas_summed(self, payload_bytes: int, seconds: float) -> None:
        """Tell of a sum over replicas."""
        for observer in self.step_observers:
            observer.on_replicas_summed(self._group.text, payload_bytes, seconds)
