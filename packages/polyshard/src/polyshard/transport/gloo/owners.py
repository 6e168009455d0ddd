"""Whole tensors to one rank over gloo, point to point, and parts of them back.

[Note: landing on an owner]
All chunks of a gradient go to one rank, from where autograd wrote them, and are added there in rank
order. What arrives waits in memory until its turn, so only the next few are asked for: a sender
whose turn has not come holds its gradient a little longer instead.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.transport.base import DONE, OwnerRoute, Pending
from polyshard.transport.gloo.messages import Message, Works
from polyshard.transport.gloo.wire import Wire

WINDOW = 3
"""Arrivals asked for at once."""


class GlooOwner(OwnerRoute):
    """See [Note: landing on an owner]."""

    def __init__(self, wire: Wire, rank: int, size: int, tag: int) -> None:
        """Among the ``size`` ranks of ``wire``, of which this is the ``rank``-th.

        ``tag`` is equal on all ranks and unique to the group of parameters.
        """
        self._wire = wire
        self._tag = tag
        self._tags: dict[tuple[str, int], int] = {}
        self._rank, self._size = rank, size

    def _begin(self, what: str, key: int, keep: object) -> Works:
        return Works(self._wire, self._tag_of(what, key), keep)

    def _tag_of(self, what: str, key: int) -> int:
        found = self._tags.get((what, key))
        if found is None:
            found = zlib.crc32(f"owner {self._tag} {what} {key}".encode()) >> 1
            self._tags[what, key] = found
        return found

    @override
    def reduce(self, key: int, owner: int, source: Tensor, out: Tensor | None) -> Pending:
        if out is None:
            works = self._begin("reduce", key, source)
            works.post("send", [Message([source], owner)])
            return works
        if self._size == 1:
            out.copy_(source)
            return DONE
        tag = self._tag_of("reduce", key)
        begin = partial(Works, self._wire, tag, number=self._wire.begin(tag))
        return _Sum(begin, self._others(owner), self._rank, source, out).begin()

    @override
    def scatter(
        self, key: int, owner: int, parts: Sequence[Tensor] | None, out: Tensor, most: int
    ) -> Pending:
        del most
        works = self._begin("scatter", key, parts or out)
        if parts is None:
            works.post("recv", [Message([out], owner)] if out.numel() else [])
            return works
        works.post(
            "send", [Message([parts[r]], r) for r in self._others(owner) if parts[r].numel()]
        )
        out.copy_(parts[owner])
        return works

    @override
    def gather(
        self, key: int, owner: int, source: Tensor, parts: Sequence[Tensor] | None, most: int
    ) -> Pending:
        del most
        works = self._begin("gather", key, source if parts is None else parts)
        if parts is None:
            works.post("send", [Message([source], owner)] if source.numel() else [])
            return works
        works.post(
            "recv", [Message([parts[r]], r) for r in self._others(owner) if parts[r].numel()]
        )
        parts[owner].copy_(source)
        return works

    @override
    def broadcast(self, key: int, owner: int, value: Tensor) -> Pending:
        if not value.numel():
            return DONE
        works = self._begin("broadcast", key, value)
        if self._rank == owner:
            works.post("send", [Message([value], r) for r in self._others(owner)])
        else:
            works.post("recv", [Message([value], owner)])
        return works

    def _others(self, owner: int) -> list[int]:
        return [r for r in range(self._size) if r != owner]


@dataclass
class _Sum:
    """Adds arrivals in rank order; the own part has its place among them."""

    start: Callable[[object], Works]
    peers: list[int]
    rank: int
    own: Tensor
    out: Tensor
    arrivals: list[tuple[Works, Tensor]] = field(default_factory=list)

    def begin(self) -> _Sum:
        """Ask for the first arrivals; the very first is written into the sum if dtypes allow."""
        for index in range(min(WINDOW, len(self.peers))):
            same = index == 0 and self.own.dtype == self.out.dtype
            self._ask(index, self.out if same else torch.empty_like(self.own))
        return self

    def _ask(self, index: int, memory: Tensor) -> None:
        works = self.start(memory)
        works.post("recv", [Message([memory], self.peers[index])])
        self.arrivals.append((works, memory))

    def wait(self) -> None:
        # Ranks 0 and 1 both start from g0 + g1, which commutes; later ones come in their turn.
        place = max(self.rank - 1, 0)
        for index in range(len(self.peers)):
            works, memory = self.arrivals[index]
            works.wait()
            if index:
                self.out.add_(memory)
            elif memory is not self.out:
                self.out.copy_(memory)
            if index == place:
                self.out.add_(self.own)
            if index + WINDOW < len(self.peers):
                spare = torch.empty_like(self.own) if memory is self.out else memory
                self._ask(index + WINDOW, spare)
        self.arrivals.clear()
