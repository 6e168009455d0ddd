"""A transport around another one, for backends that change or watch how bytes move."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.memory.streams import Lanes
from polyshard.transport.base import (
    Extents,
    GatherPiece,
    GatherRoute,
    Pending,
    ReduceRoute,
    Transport,
)

Started = Callable[[Pending, int], Pending]


class _Gather(GatherRoute):
    def __init__(self, inner: GatherRoute, started: Started) -> None:
        self._start, self._started = inner.start, started
        self.sent_bytes, self.received_bytes = inner.sent_bytes, inner.received_bytes

    @override
    def start(self) -> Pending:
        return self._started(self._start(), self.sent_bytes)


class _Reduce(ReduceRoute):
    def __init__(self, inner: ReduceRoute, started: Started) -> None:
        self._inner, self._started = inner, started
        # The engine asks whether a route overrides it: this one does where the inner one does.
        self.answer = inner.answer  # type: ignore[method-assign]

    @override
    def start(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Pending:
        return self._started(self._inner.start(sources, outs), self.sent_bytes(sources))

    @override
    def sent_bytes(self, sources: Sequence[Tensor | None]) -> int:
        return self._inner.sent_bytes(sources)


class WrappedTransport(Transport):
    """``inner`` under another roof: override :meth:`started`, or of the rest what should differ.

    Its settings are those of ``inner``, and setting them sets them there. A block of it is a copy
    of this object around the block of ``inner``.
    """

    inner: Transport
    """The transport that moves the bytes."""

    def __init__(self, inner: Transport) -> None:
        """Wrap what :func:`choose_transport` or another backend's ``connect`` made."""
        self.name = inner.name
        self._wrap(inner)

    def _wrap(self, inner: Transport) -> Self:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        return self

    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        """See a transfer that just started, by which ``sent_bytes`` leave this rank.

        Return what the engine is to wait for: ``pending``, or an object that waits for it.
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
    def block(self, size: int) -> Self:
        """A copy of this object, around the block of the inner transport."""
        return copy.copy(self)._wrap(self.inner.block(size))

    @override
    def use_lanes(self, lanes: Lanes) -> None:
        self.inner.use_lanes(lanes)

    @override
    def separate_reductions(self, enable: bool) -> None:
        self.inner.separate_reductions(enable)

    @override
    def exchange(self, payloads: Tensor, received: Tensor) -> Pending:
        """The inner exchange, through :meth:`started`."""
        sent_bytes = payloads.nbytes // self.size * (self.size - 1)
        return self.started(self.inner.exchange(payloads, received), sent_bytes)

    @property
    def staging_bytes(self) -> int:
        """Those of the inner transport."""
        return self.inner.staging_bytes

    @staging_bytes.setter
    def staging_bytes(self, value: int) -> None:
        self.inner.staging_bytes = value

    @property
    def staging_reason(self) -> str:
        """That of the inner transport."""
        return self.inner.staging_reason

    @staging_reason.setter
    def staging_reason(self, value: str) -> None:
        self.inner.staging_reason = value

    @property
    def can_coalesce(self) -> bool:
        """Whether the inner transport can."""
        return self.inner.can_coalesce

    @can_coalesce.setter
    def can_coalesce(self, value: bool) -> None:
        self.inner.can_coalesce = value

    @property
    def coalesces(self) -> bool:
        """Whether the inner transport does."""
        return self.inner.coalesces

    @coalesces.setter
    def coalesces(self, value: bool) -> None:
        self.inner.coalesces = value
