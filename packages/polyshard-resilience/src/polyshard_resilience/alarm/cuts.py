"""Which ranks have cut their process groups, as the store knows it.

[Note: who has cut]
A process group that one rank has cut is broken for all of its ranks, and works again only when all
of them connect anew (:mod:`polyshard_resilience.mending`). So a rank that cuts says so before,
and takes that back when its groups are repaired. Others may read the list once no rank can cut any
more: a rank cuts only until it enters the next epoch. Ranks that recover wait until all have come
to theirs (ranks that were told again of one failure leave several behind). They do not wait long
for a rank that is busy elsewhere: the first to look says what all ranks of the epoch repair. A rank
that comes later, and finds another of its groups broken, lets all fail once more. Were it to repair
that one now, it would wait for ranks that wait for it in the next step.

[Note: out of step] A group in which no rank waits can be broken as well. A rank that was told of a
failure after it had begun a collective, and before it needed the result, leaves messages behind
that others will take for those of the next collective: gloo ends their processes for it. So ranks
that enter an epoch compare how many collectives each has begun in every group, and one that finds
another number than the first to come says that this group is broken. One that was aborted on a
device is broken in any case.

[Note: kept epochs] Only the reports of the last :data:`KEPT` epochs stay. A rank that was away for
longer (stopped, say) would take one that was forgotten for free; so the number of the last one to
end stays as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from polyshard.agreement.board import look

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
        """The key that counts the ranks that have entered ``epoch``."""
        return f"{self.prefix}/come/{epoch}"

    def repaired(self, epoch: int) -> str:
        """The key that says what the ranks of ``epoch`` repair."""
        return f"{self.prefix}/repaired/{epoch}"

    def end(self, store: dist.Store, epoch: int, text: str) -> str:
        """End ``epoch`` with a report; the one that stands, which may be another's."""
        standing: bytes = store.compare_set(self.report(epoch), "", text)
        if epoch > self._last(store):
            store.set(self._key, str(epoch))
        old = epoch - KEPT
        for key in (self.report, self.detail, self.come, self.repaired):
            store.delete_key(key(old))
        return standing.decode()

    def told(self, store: dist.Store, epoch: int) -> str | None:
        """The report that ended ``epoch``; the newest one, where that is kept no more.

        A rank that fails waits for the others' vote, and tells them again and again of it.
        """
        found = look(store, self.report(epoch))
        if found is None and (last := self._last(store)) >= epoch + KEPT:
            found = look(store, self.report(last))
        return found

    def first_free(self, store: dist.Store, number: int) -> int:
        """The first epoch from ``number`` on that no rank has ended."""
        free = max(number, self._last(store) - KEPT + 1)
        while store.check([self.report(free)]):
            free += 1
        return free

    @property
    def _key(self) -> str:
        return f"{self.prefix}/last"

    def _last(self, store: dist.Store) -> int:
        return int(look(store, self._key) or -1)


@dataclass(frozen=True)
class Broken:
    """Process groups that do not work."""

    cut: frozenset[int]
    """All groups of these ranks."""
    apart: frozenset[str]
    """Groups whose ranks are out of step."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.cut or self.apart)

    def includes(self, name: str, ranks: Collection[int]) -> bool:
        """Whether the group of this name and these ranks is one of them."""
        return name in self.apart or not self.cut.isdisjoint(ranks)

    def __str__(self) -> str:
        """For messages."""
        said = [f"that ranks {sorted(self.cut)} had to cut"] if self.cut else []
        said += ["in which ranks are out of step"] if self.apart else []
        return " and ".join(said)


NOTHING_BROKEN = Broken(frozenset(), frozenset())


@dataclass(frozen=True)
class Cuts:
    """Of the ranks of one alarm."""

    prefix: str
    """Of its keys in the store."""

    def add(self, store: dist.Store, rank: int) -> None:
        """``rank`` is about to cut its groups."""
        self._change(store, RANKS, {str(rank)}, set())

    def aborted(self, store: dist.Store, groups: Collection[str]) -> None:
        """A rank has aborted these ``groups``: its number of collectives there means nothing."""
        self._change(store, GROUPS, set(groups), set())

    def mended(self, store: dist.Store, rank: int, groups: Collection[str]) -> None:
        """These ``groups``, which are all of ``rank`` that were broken, work again."""
        self._change(store, RANKS, set(), {str(rank)})
        self._change(store, GROUPS, set(), set(groups))

    def read(self, store: dist.Store) -> Broken:
        """What is broken."""
        ranks, groups = (_decoded(look(store, self._key(kind)) or "") for kind in (RANKS, GROUPS))
        return Broken(frozenset(map(int, ranks)), frozenset(groups))

    def agree(self, store: dist.Store, key: str) -> tuple[Broken, Broken]:
        """What is broken, and what ranks repair: the first of them to ask writes it to ``key``."""
        broken = self.read(store)
        text = json.dumps([sorted(broken.cut), sorted(broken.apart)])
        said: bytes = store.compare_set(key, "", text)
        ranks, groups = json.loads(said)
        return broken, Broken(frozenset(ranks), frozenset(groups))

    def compare(self, store: dist.Store, epoch: int, begun: Mapping[str, int]) -> None:
        """This rank enters ``epoch``. See [Note: out of step].

        Args:
            store: Of all ranks.
            epoch: The same number on all that enter together.
            begun: Collectives so far, by group: all of its ranks call it the same.
        """
        apart = set()
        for name, count in begun.items():
            first: bytes = store.compare_set(f"{self.prefix}/begun/{epoch}/{name}", "", str(count))
            if int(first) != count:
                apart.add(name)
            store.delete_key(f"{self.prefix}/begun/{epoch - KEPT}/{name}")
        if apart:
            self._change(store, GROUPS, apart, set())

    def _key(self, kind: str) -> str:
        return f"{self.prefix}/broken/{kind}"

    def _change(self, store: dist.Store, kind: str, more: set[str], less: set[str]) -> None:
        key = self._key(kind)
        before = look(store, key) or ""
        while True:
            names = _decoded(before)
            if more <= names and less.isdisjoint(names):
                return
            after = ",".join(sorted(names - less | more)) or NOBODY
            found: str = store.compare_set(key, before, after).decode()
            if found == after:
                return
            before = found


RANKS, GROUPS = "ranks", "groups"
NOBODY = "-"
"""An empty value would read as none at all, which is written only once."""


def _decoded(text: str) -> set[str]:
    return {name for name in text.split(",") if name and name != NOBODY}
