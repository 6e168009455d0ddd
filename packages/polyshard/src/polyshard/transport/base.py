"""Base classes for moving the bytes of a group: pieces, routes and pending transfers.

A *piece* is one contiguous chunk per rank: a direct parameter, the packed slice of all staged
ones, or a codec's payload. A *route* binds the pieces of a group to memory once, so that a step
only starts it and waits.
"""

# ruff: noqa: B027  (an empty method is a default)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from polyshard.errors import UnsupportedError


@dataclass(frozen=True)
class Extents:
    """Number of elements of a piece on each rank; the rest of its chunk is padding."""

    chunk_numel: int
    numels: tuple[int, ...]
    alike: tuple[tuple[int, int], ...] = ()
    """Ranges whose sums must be the same on all ranks."""

    @property
    def is_even(self) -> bool:
        """Whether no rank has padding."""
        return all(n == self.chunk_numel for n in self.numels)


@dataclass(frozen=True)
class GatherPiece:
    """One piece of an all-gather.

    ``source`` is this rank's chunk (``[chunk_numel]``) in its storage, ``region`` the target
    (``[W, chunk_numel]``, contiguous). If their dtypes differ, the transfer casts.
    """

    source: Tensor
    region: Tensor
    extents: Extents


class Turn:
    """Which turn of a root it is; see [Note: turns] in freshness.py."""

    def __init__(self) -> None:
        """None has begun."""
        self.number = 0
        self.count = 0
        """The number since ranks last began anew, alike on all: transfers are told apart by it."""
        self.epoch = 0
        self.steps = 0
        """How often optimizers of the root's parameters have stepped, as far as anybody counts."""
        self.in_forward = False
        self.in_backward = False

    def begin(self, epoch: int = 0) -> None:
        """An outermost forward starts, after ranks began anew ``epoch`` times."""
        if epoch != self.epoch:
            self.epoch, self.count = epoch, 0
        self.number += 1
        self.count += 1
        self.in_forward = True

    def vouches(self, made: int) -> bool:
        """Whether what was made of a shard in turn ``made`` is good without a look."""
        return self.in_backward or (self.in_forward and made == self.number)


class Pending(Protocol):
    """A transfer in flight. The engine keeps its memory until :meth:`wait` has returned."""

    def wait(self) -> None:
        """Return when the current stream may use the results. Call exactly once."""
        ...


class GatherRoute(ABC):
    """An all-gather bound to memory."""

    sent_bytes: int
    """Bytes that this rank sends in each :meth:`start`; ``describe()`` shows them."""
    received_bytes: int
    """Bytes that this rank receives."""
    scratch_bytes: int = 0
    """Bytes that :meth:`start` allocates until the wait, beside sources and regions."""
    on_stream: bool = False
    """Whether :meth:`start` puts its work on the current stream, if the device has streams, and
    allocates no memory. The engine then calls it on a communication stream, and orders the rest."""

    @abstractmethod
    def start(self) -> Pending:
        """Start; do not change sources or read regions before the wait."""


class ReduceRoute(ABC):
    """A reduce-scatter bound to a layout; gradients differ from step to step."""

    on_stream: bool = False
    """As :attr:`GatherRoute.on_stream`."""
    is_awaited: bool = True
    """Whether its transfers need :meth:`Pending.wait` in addition to the order of streams."""

    def prepare(self, sources: list[Tensor | None]) -> None:
        """Make of the sources those for :meth:`start`, one by one: each old one is freed first."""

    @abstractmethod
    def start(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Pending:
        """Sum chunk ``rank`` of every rank's source into ``outs``.

        Args:
            sources: per piece the flat contiguous gradient in rank-chunk order, without trailing
                padding (``[sum(numels)]``), wire dtype; ``None`` where a piece takes no part.
            outs: per piece ``[chunk_numel]`` in the reduction's dtype; overwritten.
        """

    @abstractmethod
    def sent_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """Return the bytes that this rank sends for these sources."""

    def received_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """Return the bytes that reach this rank for them; by default, as many as it sends."""
        return self.sent_bytes(sources)

    def scratch_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """Return the bytes used until the wait, without sources and sums.

        Plans call it with tensors on the meta device. By default, the memory that :meth:`prepare`
        allocates.
        """
        made = list(sources)
        self.prepare(made)
        pairs = zip(made, sources, strict=True)
        return sum(new.nbytes for new, old in pairs if new is not None and new is not old)

    def in_tree(self) -> ReduceRoute | None:
        """Return the route with sums over a binary tree of the ranks; ``None`` if unsupported.

        Node ``i`` of a level is the sum of nodes ``2 i`` and ``2 i + 1`` below it, in the dtype of
        sums; the ranks are a power of two.
        """
        return None

    def answer(self, peer: int, takes_part: Sequence[bool], dtype: torch.dtype) -> Pending:
        """Join the reduction that ``peer`` started for its pieces, with zeros.

        The peer discards the result. For routes that can complete transfers after ranks found that
        they have gradients of different pieces: every rank answers every other one. Without an
        override the engine never calls this, and starts a reduction only after ranks have agreed.
        """
        raise NotImplementedError


class OwnerRoute(ABC):
    """Sends whole tensors to one rank of an axis, and parts of them back.

    ``key`` distinguishes concurrent transfers; all ranks make the same calls. Tensors are flat and
    contiguous, and must not change before the wait.
    """

    @abstractmethod
    def reduce(self, key: int, owner: int, source: Tensor, out: Tensor | None) -> Pending:
        """Sum every rank's ``source`` (wire dtype) into ``out`` on rank ``owner``, in rank order.

        ``out`` has the dtype of sums, and is ``None`` on every other rank.
        """

    @abstractmethod
    def scatter(
        self, key: int, owner: int, parts: Sequence[Tensor] | None, out: Tensor, most: int
    ) -> Pending:
        """Send ``parts[r]``, which only ``owner`` has, to ``out`` on rank ``r``.

        No part has more than ``most`` elements.
        """

    @abstractmethod
    def gather(
        self, key: int, owner: int, source: Tensor, parts: Sequence[Tensor] | None, most: int
    ) -> Pending:
        """Send ``source`` of rank ``r`` to ``parts[r]`` on ``owner``: the inverse of a scatter."""

    @abstractmethod
    def broadcast(self, key: int, owner: int, value: Tensor) -> Pending:
        """Send ``value`` of ``owner`` to ``value`` on all ranks."""


class Transport(ABC):
    """Moves bytes between the ranks of one shard axis."""

    name: str
    """Name in plans; the same on every rank."""
    rank: int
    """This rank's position on the shard axis, or in its block."""
    size: int
    """Number of ranks."""
    staging_bytes: int
    """Chunks below this many bytes are packed: a small copy costs less than another message."""

    staging_reason: str = "built in"
    """Origin of :attr:`staging_bytes`, as ``describe()`` shows it."""

    can_coalesce: bool = False
    """Whether :attr:`coalesces` may be set, before routes are made."""

    coalesces: bool = False
    """Whether one launch starts all transfers of a group."""

    exchanges_on_stream: bool = False
    """As :attr:`GatherRoute.on_stream`, for :meth:`exchange`."""

    @abstractmethod
    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> GatherRoute:
        """Bind an all-gather to memory. ``tag`` is equal on all ranks and unique to the group."""

    @abstractmethod
    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> ReduceRoute:
        """Bind a reduce-scatter whose sums are kept in ``dtype``."""

    def owner_route(self, dtype: torch.dtype, tag: int) -> OwnerRoute:
        """Return a route for whole gradients to their owners, with sums in ``dtype``.

        Without an override it raises, and gradients can only be scattered to shards.
        """
        del dtype, tag
        raise UnsupportedError(
            f"transport '{self.name}' has no owner_route, so it cannot send a whole gradient to "
            "one rank. Remove the plugin whose gradients land on owners, or use another transport."
        )

    @abstractmethod
    def block(self, size: int) -> Transport:
        """Return this transport for this rank's block of ``size`` ranks.

        Every rank of the axis calls it at the same point.
        """

    def use_turns(self, turns: Turn) -> None:
        """Include the count of ``turns`` in tags of later transfers."""

    def separate_reductions(self, enable: bool) -> None:
        """Set whether reductions use a communicator of their own."""

    @abstractmethod
    def exchange(self, payloads: Tensor, received: Tensor) -> Pending:
        """Exchange equal rows, all-to-all: row ``r`` of ``payloads`` goes to rank ``r``."""


class _Done:
    def wait(self) -> None:
        """Nothing to do."""


DONE: Pending = _Done()
"""A transfer that is already complete."""
