"""Reductions in flight below one root: how many there are, and when each is finished.

One is left in flight while the next unit's backward computes, and gives its memory up before
another starts. Where replicas are still being summed then, it is finished with the backward only,
so that the computation waits for no link that is slower than those of the shard axis; unless its
storage moves gradients off the device, which it should do meanwhile.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from torch import Tensor

from polyshard.exchange.flight import InFlight
from polyshard.group.group import ParameterGroup
from polyshard.seams import ShardStorage, overrides


class Reductions:
    """Those of one root, oldest first."""

    def __init__(self) -> None:
        self.most = 1
        """How many may hold what they send."""
        self._sending: deque[tuple[ParameterGroup, InFlight]] = deque()
        self._summing: deque[tuple[ParameterGroup, InFlight]] = deque()
        self._may_hold: dict[ParameterGroup, None] = {}

    def __bool__(self) -> bool:
        return bool(self._sending or self._summing)

    def start(self, group: ParameterGroup, gradients: dict[int, Tensor], *, is_last: bool) -> None:
        """Start to reduce, after earlier reductions have made room."""
        while len(self._sending) >= self.most:
            oldest, flight = self._sending.popleft()
            if not _is_moved(oldest) and flight.let_go():
                self._summing.append((oldest, flight))
            else:
                self._finish(oldest, flight)
        flight = group.start_reduction(gradients)
        flight.is_last = is_last
        self._sending.append((group, flight))

    def lack_replicas(self, group: ParameterGroup) -> bool:
        """Whether some of ``group`` will end in sums that lack those of other replicas."""
        return any(g is group and not f.sums_replicas for g, f in self._sending)

    def finish_sums(self) -> None:
        """A backward has ended: put in place what replicas were still summing."""
        while self._summing:
            self._finish(*self._summing.popleft())

    def finish(self) -> None:
        """Put all sharded gradients in place."""
        self.finish_sums()
        while self._sending:
            self._finish(*self._sending.popleft())

    def _finish(self, group: ParameterGroup, flight: InFlight) -> None:
        group.finish_reduction(flight)
        if not flight.is_last:
            self._may_hold[group] = None

    def place_held(self) -> None:
        """Put in place what earlier backwards left, and no reduction of the last took along."""
        for group in self._may_hold:
            group.place_held()
        self._may_hold.clear()

    def remember(self) -> dict[ParameterGroup, None]:
        """Groups that may hold gradients now; :meth:`put_back` takes them."""
        return dict(self._may_hold)

    def put_back(self, may_hold: dict[ParameterGroup, None]) -> None:
        """These groups may hold gradients again."""
        self._may_hold.update(may_hold)

    def drop(self) -> None:
        """End all of them, and forget what came of them."""
        for _, flight in (*self._summing, *self._sending):
            with suppress(RuntimeError):  # whose peers may be gone
                flight.end()
        self._summing.clear()
        self._sending.clear()
        self._may_hold.clear()


def _is_moved(group: ParameterGroup) -> bool:
    return overrides(group.shards.storage.place_gradient, ShardStorage.place_gradient)
