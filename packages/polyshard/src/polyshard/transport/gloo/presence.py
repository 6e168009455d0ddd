"""Ranks tell each other of which parameters they have gradients, so that no sum is a wrong one.

[Note: presence]
Ranks whose control flow differs have gradients of different parameters. Their messages would meet
as if they were of one parameter, or wait for ever; and where a sum does come about, only the ranks
with a gradient of their own would keep their part of it. So every reduction is accompanied by one
small message to each rank of the mesh: a bit for each parameter of the group. They are compared
before anything reaches ``.grad``, and since every rank hears from every other, all come to the same
verdict. Replicas that add up partial sums may differ until those are summed over the replicas: so
the message also says what that sum would hold.

The messages need gloo over all ranks of the mesh, and tensors on the CPU. On an accelerator reading
them would stop the host in every reduction; there polyshard-resilience compares ranks once, at the
end of a backward (``FailureHandler.end_step``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import Turn
from polyshard.transport.gloo.messages import Message, Works, in_turn
from polyshard.transport.gloo.wire import wire_of

WORD_BITS = 32
ROWS = 16
"""Messages that are kept, by what they say."""


@dataclass(frozen=True)
class Told:
    """Messages in flight, and what this rank said."""

    works: Works
    own: list[int]
    received: Tensor
    """``[peers, 2 * words]``."""
    presence: Presence
    sums_replicas: bool

    def hear(self) -> Difference | None:
        """Wait for all ranks; what they said, if not all said the same."""
        self.works.wait()
        rows = self.received.tolist()
        if rows == [self.own] * len(rows):
            return None
        said = dict(zip(self.presence.peers, rows, strict=True))
        said[self.presence.rank] = self.own
        found = self.presence.difference(said, sums_replicas=self.sums_replicas)
        return None if found is None else Difference(found, said)


@dataclass(frozen=True)
class Difference:
    """Ranks that cannot be summed: bits by rank, of what was compared and of all that was told."""

    compared: Mapping[int, Sequence[int]]
    said: Mapping[int, Sequence[int]]

    def present(self, rank: int) -> Callable[[int], bool]:
        """Whether ``rank`` has a gradient of a parameter, by its index."""
        row = self.said[rank]
        return lambda index: bool(row[index // WORD_BITS] >> index % WORD_BITS & 1)

    def describe(self, names: Sequence[str]) -> str:
        """Which ranks have gradients of which parameters, and the remedy."""
        return (
            "ranks have gradients of different parameters, and cannot sum them: "
            f"{'; '.join(self._lines(names))}. Use the same parameters on every rank, or call "
            "set_reduce_scatter_unused_params(True) on the model, so that ranks without a gradient "
            "send zeros. Then call reset_iter_state() on every rank."
        )

    def _lines(self, names: Sequence[str]) -> Iterator[str]:
        rows = self.compared
        for index, name in enumerate(names):
            word, bit = index // WORD_BITS, 1 << index % WORD_BITS
            having = sorted(rank for rank, row in rows.items() if row[word] & bit)
            if having and len(having) < len(rows):
                lacking = sorted(set(rows) - set(having))
                yield f"'{name}' has one on ranks {having} and none on ranks {lacking}"


class Presence:
    """The messages of one group. See [Note: presence]."""

    def __init__(
        self, roles: MeshRoles, group: dist.ProcessGroup, tag: int, count: int, turns: Turn
    ) -> None:
        """For ``count`` parameters; ``group`` holds all ranks of the mesh, and runs on gloo."""
        self.rank = dist.get_rank()
        self.peers = tuple(rank for rank in roles.ranks if rank != self.rank)
        self._replicas = list(roles.replicas)
        self._wire, self._turns = wire_of(group, roles.ranks), turns
        self._numbers = [self._wire.number_of(rank) for rank in self.peers]
        self._tag = zlib.crc32(f"presence {tag} {roles.ranks}".encode()) >> 1
        self._count = count
        self._words = -(-count // WORD_BITS)
        self.control_bytes = len(self.peers) * 2 * self._words * 8
        """Bytes of the messages that leave this rank."""
        self._rows: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
        self._said: tuple[list[int], Tensor] = ([], torch.empty(0, device="cpu"))

    def tell(self, present: frozenset[int], summed: frozenset[int], *, sums_replicas: bool) -> Told:
        """Say which gradients this reduction sums, and which sums it leaves behind."""
        own = self._rows.get((present, summed)) or self._row(present, summed)
        if own != self._said[0]:  # a new tensor: the old one may still be on its way
            self._said = (own, torch.tensor(own, dtype=torch.int64, device="cpu"))
        message = self._said[1]
        received = torch.empty((len(self.peers), len(own)), dtype=torch.int64, device="cpu")
        works = Works(self._wire, in_turn(self._tag, self._turns.count))
        receives, sends = [], []
        for row, peer in zip(received.unbind(), self._numbers, strict=True):
            receives.append(Message([row], peer))
            sends.append(Message([message], peer))
        works.post("recv", receives)
        works.post("send", sends)
        return Told(works, own, received, self, sums_replicas)

    def _row(self, present: frozenset[int], summed: frozenset[int]) -> list[int]:
        """What is told; kept, because it is the same in most steps."""
        if len(self._rows) >= ROWS:
            self._rows.clear()
        row = self._rows[present, summed] = [*self._bits(present), *self._bits(summed)]
        return row

    def _bits(self, indices: Iterable[int]) -> list[int]:
        words = [0] * self._words
        for index in indices:
            words[index // WORD_BITS] |= 1 << index % WORD_BITS
        return words

    def difference(
        self, said: Mapping[int, Sequence[int]], *, sums_replicas: bool
    ) -> dict[int, Sequence[int]] | None:
        """The bits by rank, where those that are summed together do not agree."""
        checks = [(slice(0, self._words), self._replicas)]
        if sums_replicas:
            checks.append((slice(self._words, None), [tuple(said)]))
        for part, together in checks:
            rows = {rank: row[part] for rank, row in said.items()}
            if any(len({tuple(rows[rank]) for rank in ranks}) > 1 for ranks in together):
                return rows
        return None
