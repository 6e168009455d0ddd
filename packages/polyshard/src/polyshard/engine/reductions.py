"""Reductions in flight below one root: how many there are, and when each is finished.

One is left in flight while the next unit's backward computes, and gives its memory up before
another starts. Where replicas are still being summed then, it is finished with the backward only,
so that the computation waits for no link that is slower than those of the shard axis; unless its
storage moves gradients off the device, which it should do meanwhile.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from polyshard.group.group import ParameterGroup
from polyshard.program.executor import abandon
from polyshard.program.ops import Frame


class Reductions:
    """Those of one root, oldest first."""

    def __init__(self) -> None:
        self.most = 1
        """How many may hold what they send."""
        self._sending: deque[tuple[ParameterGroup, Frame]] = deque()
        self._summing: deque[tuple[ParameterGroup, Frame]] = deque()
        self._may_hold: dict[ParameterGroup, None] = {}

    def __bool__(self) -> bool:
        return bool(self._sending or self._summing)

    def start(self, group: ParameterGroup, gradients: dict[int, Tensor], *, is_last: bool) -> None:
        """Start to reduce, after earlier reductions have made room."""
        while len(self._sending) >= self.most:
            oldest, frame = self._sending.popleft()
            if frame.program.early:
                oldest.free_sent(frame)
                self._summing.append((oldest, frame))
            else:
                oldest.finish_reduction(frame)
        self._sending.append((group, group.start_reduction(gradients, is_last=is_last)))
        if not is_last:
            self._may_hold[group] = None

    def lack_replicas(self, group: ParameterGroup) -> bool:
        """Whether some of ``group`` will end in sums that lack those of other replicas."""
        return any(g is group and not frame.key.all_reduces for g, frame in self._sending)

    def finish_sums(self) -> None:
        """A backward has ended: put in place what replicas were still summing."""
        while self._summing:
            group, frame = self._summing.popleft()
            group.finish_reduction(frame)

    def finish(self) -> None:
        """Put all sharded gradients in place."""
        self.finish_sums()
        while self._sending:
            group, frame = self._sending.popleft()
            group.finish_reduction(frame)

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
        for _, frame in (*self._summing, *self._sending):
            abandon(frame)
        self._summing.clear()
        self._sending.clear()
        self._may_hold.clear()
