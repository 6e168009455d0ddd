"""Which epochs of an alarm are over, as the store knows it; it is to hold as much in a year.

[Note: kept epochs]
Only the reports of the last :data:`KEPT` epochs stay. A rank that was away for longer (stopped,
say) would take one that was forgotten for free; so the number of the last one to end stays as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from polyshard.alarm.board import look

KEPT = 16


@dataclass(frozen=True)
class Epochs:
    """Those of one alarm."""

    prefix: str
    """Of its keys in the store."""

    def report(self, epoch: int) -> str:
        """Where the report that ended ``epoch`` stands."""
        return f"{self.prefix}/ended/{epoch}"

    def detail(self, epoch: int) -> str:
        """Where its rank adds the exception."""
        return f"{self.prefix}/detail/{epoch}"

    def come(self, epoch: int) -> str:
        """Where is counted how many ranks have gone on to ``epoch``."""
        return f"{self.prefix}/come/{epoch}"

    def end(self, store: dist.Store, epoch: int, text: str) -> str:
        """End ``epoch`` with a report; the one that stands, which may be another's."""
        standing: bytes = store.compare_set(self.report(epoch), "", text)
        if epoch > self._last(store):
            store.set(self._key, str(epoch))
        old = epoch - KEPT
        for key in (self.report(old), self.detail(old), self.come(old)):
            store.delete_key(key)
        return standing.decode()

    def first_free(self, store: dist.Store, number: int) -> int:
        """The first epoch from ``number`` on that nobody has ended."""
        free = max(number, self._last(store) - KEPT + 1)
        while store.check([self.report(free)]):
            free += 1
        return free

    @property
    def _key(self) -> str:
        return f"{self.prefix}/last"

    def _last(self, store: dist.Store) -> int:
        return int(look(store, self._key) or -1)
