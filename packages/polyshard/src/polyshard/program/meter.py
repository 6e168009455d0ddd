"""What a group has moved, and its observers: one call per event of the life cycle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from polyshard.params.sharded import Shards
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import GroupIdentity, Observer, overrides

PLAIN = ("on_unshard", "on_unsharded", "on_reshard", "on_reduce", "on_reduced", "on_step_end")
"""What costs nothing to tell, as the engine counts it anyway."""


def tell(observers: Iterable[Observer], event: str, *given: object) -> None:
    """Call the method ``event`` of each of ``observers``."""
    for observer in observers:
        getattr(observer, event)(*given)


@dataclass
class Moved:
    """What a group has moved so far on this rank, in bytes and calls."""

    sent_bytes: int = 0
    received_bytes: int = 0
    gathers: int = 0
    reductions: int = 0
    wait_seconds: float = 0.0


class Meter:
    """Counts a group's traffic and tells its observers; a loop over an empty tuple without any."""

    def __init__(self, group: GroupIdentity, observers: tuple[Observer, ...]) -> None:
        """``observers`` in plugin order, which are told the group's name."""
        self._group = group
        self.observers = observers
        self.step_observers = tuple(filter(_watches_steps, observers))
        self.traffic = Moved()

    def tell(self, event: str, *given: object) -> None:
        """Call the method ``event`` of every observer, with the name of the group and ``given``."""
        tell(self.observers, event, self._group.text, *given)

    def fetching(self, shards: Shards) -> Callable[[], None]:
        """Fetches the shard; tells observers, if there are any and it rests elsewhere."""
        if not (self.step_observers and overrides(shards.storage.fetch, DeviceStorage.fetch)):
            return shards.fetch

        def fetch() -> None:
            begin = time.perf_counter()
            shards.fetch()
            num_bytes = shards.layout.shard_numel * shards.dtype.itemsize
            self.tell("on_staged", "fetch", num_bytes, time.perf_counter() - begin)

        return fetch


def _watches_steps(observer: Observer) -> bool:
    """Whether it overrides a method that is called for more than transfers of groups."""
    return any(
        overrides(getattr(observer, name), default)
        for name, default in vars(Observer).items()
        if name.startswith("on_") and name not in PLAIN
    )
