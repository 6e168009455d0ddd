"""A transport around another one, for backends that change or watch how bytes move."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.transport.base import (
    Extents,
    GatherPiece,
    GatherRoute,
    OwnerRoute,
    Pending,
    ReduceRoute,
    Transport,
    Turn,
)

Started = Callable[[Pending, int], Pending]


class _Gather(GatherRoute):
    def __init__(self, inner: GatherRoute, started: Started) -> None:
        self._start, self._started = inner.start, started
        self.on_stream = inner.on_stream
        self.sent_bytes, self.received_bytes = inner.sent_bytes, inner.received_bytes
        self.scratch_bytes = inner.scratch_bytes

    @override
    def start(self) -> Pending:
        return self._started(self._start(), self.sent_bytes)


class _Reduce(ReduceRoute):
    def __init__(self, inner: ReduceRoute, started: Started) -> None:
        self._inner, self._started = inner, started
        self.on_stream = inner.on_stream
        # The engine asks whether a route overrides it: this one does where the inner one does.
        self.answer = inner.answer  # type: ignore[method-assign]

    @override
    def in_tree(self) -> ReduceRoute | None:
        inner = self._inner.in_tree()
        return None if inner is None else _Reduce(inner, self._started)

    @override
    def prepare(self, sources: list[Tensor | None]) -> None:
        self._inner.prepare(sources)

    @override
    def start(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Pending:
        return self._started(self._inner.start(sources, outs), self.sent_bytes(sources))

    @override
    def sent_bytes(self, sources: Sequence[Tensor | None]) -> int:
        return self._inner.sent_bytes(sources)

    @override
    def received_bytes(self, sources: Sequence[Tensor | None]) -> int:
        return self._inner.received_bytes(sources)

    @override
    def scratch_bytes(self, sources: Sequence[Tensor | None]) -> int:
        return self._inner.scratch_bytes(sources)


class _Owner(OwnerRoute):
    def __init__(self, inner: OwnerRoute, rank: int, started: Started) -> None:
        self._inner, self._rank, self._started = inner, rank, started

    @override
    def reduce(self, key: int, owner: int, source: Tensor, out: Tensor | None) -> Pending:
        sent = source.nbytes if out is None else 0
        return self._started(self._inner.reduce(key, owner, source, out), sent)

    @override
    def scatter(
        self, key: int, owner: int, parts: Sequence[Tensor] | None, out: Tensor, most: int
    ) -> Pending:
        sent = sum(p.nbytes for p in parts or ()) - (out.nbytes if parts else 0)
        return self._started(self._inner.scatter(key, owner, parts, out, most), sent)

    @override
    def gather(
        self, key: int, owner: int, source: Tensor, parts: Sequence[Tensor] | None, most: int
    ) -> Pending:
        sent = 0 if parts else source.nbytes
        return self._started(self._inner.gather(key, owner, source, parts, most), sent)

    @override
    def broadcast(self, key: int, owner: int, value: Tensor) -> Pending:
        sent = value.nbytes if self._rank == owner else 0
        return self._started(self._inner.broadcast(key, owner, value), sent)


def _of_inner(name: str) -> Any:
    """An attribute that is read and written where the inner transport has it."""

    def read(transport: WrappedTransport) -> Any:
        """That of the inner transport."""
        return getattr(transport.inner, name)

    def write(transport: WrappedTransport, value: object) -> None:
        setattr(transport.inner, name, value)

    return property(read, write)


class WrappedTransport(Transport):
    """Forwards to ``inner``: override :meth:`started`, or other members that should differ.

    It reads and writes the settings of ``inner``. Its block is a copy of this object around the
    block of ``inner``.
    """

    inner: Transport
    """The transport that moves the bytes."""
    staging_bytes = _of_inner("staging_bytes")
    staging_reason = _of_inner("staging_reason")
    can_coalesce = _of_inner("can_coalesce")
    coalesces = _of_inner("coalesces")

    def __init__(self, inner: Transport) -> None:
        """Wrap what :func:`choose_transport` or another backend's ``connect`` made."""
        self.name = inner.name
        self._wrap(inner)

    def _wrap(self, inner: Transport) -> Self:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.exchanges_on_stream = inner.exchanges_on_stream
        return self

    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        """Called after a transfer started, in which this rank sends ``sent_bytes``.

        Return the object that the engine waits for: ``pending``, or one that waits for it.
        """
        del sent_bytes
        return pending

    @override
    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> GatherRoute:
        """The inner route; its transfers go through :meth:`started`."""
        return _Gather(self.inner.gather_route(pieces, tag), self.started)

    @override
    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> ReduceRoute:
        """The inner route; its transfers go through :meth:`started`."""
        return _Reduce(self.inner.reduce_route(extents, dtype, tag), self.started)

    @override
    def owner_route(self, dtype: torch.dtype, tag: int) -> OwnerRoute:
        """The inner route; its transfers go through :meth:`started`."""
        return _Owner(self.inner.owner_route(dtype, tag), self.rank, self.started)

    @override
    def block(self, size: int) -> Self:
        """A copy of this object, around the block of the inner transport."""
        return copy.copy(self)._wrap(self.inner.block(size))

    @override
    def use_turns(self, turns: Turn) -> None:
        self.inner.use_turns(turns)

    @override
    def separate_reductions(self, enable: bool) -> None:
        self.inner.separate_reductions(enable)

    @override
    def exchange(self, payloads: Tensor, received: Tensor) -> Pending:
        """The inner exchange, through :meth:`started`."""
        sent_bytes = payloads.nbytes // self.size * (self.size - 1)
        return self.started(self.inner.exchange(payloads, received), sent_bytes)
