"""What it means to move a group's bytes: pieces, routes and pending transfers.

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
from polyshard.memory.streams import ARRIVED, Lanes


@dataclass(frozen=True)
class Extents:
    """How many elements of a piece are real on each rank; the rest of a chunk is padding."""

    chunk_numel: int
    numels: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        """Whether no rank has padding."""
        return all(n == self.chunk_numel for n in self.numels)


@dataclass(frozen=True)
class GatherPiece:
    """One piece of an all-gather.

    ``source`` is this rank's chunk (``[chunk_numel]``) where it rests, ``region`` the target
    (``[W, chunk_numel]``, contiguous). Their dtypes may differ: then the transfer casts.
    """

    source: Tensor
    region: Tensor
    extents: Extents


class Turns(Protocol):
    """Counts the outermost forwards of a root, alike on all ranks."""

    @property
    def count(self) -> int:
        """How many there were since all ranks began anew."""
        ...


@dataclass(frozen=True)
class _NoTurns:
    count: int = 0


NO_TURNS: Turns = _NoTurns()
"""Before there is a root."""


class Pending(Protocol):
    """A transfer in flight. The engine keeps the memory it uses until it was waited for."""

    def wait(self) -> None:
        """Return when its results may be used on the current stream. Call exactly once."""
        ...


class GatherRoute(ABC):
    """An all-gather bound to memory."""

    sent_bytes: int
    """Bytes that leave this rank with each :meth:`start`: what ``describe()`` predicts."""
    received_bytes: int
    """Bytes that arrive."""
    on_stream: bool = False
    """Whether :meth:`start` gives its work to the stream that is current, where the device has
    streams, and takes no memory: the engine calls it on a lane then, and orders what follows."""

    @abstractmethod
    def start(self) -> Pending:
        """Begin; sources must not change, nor regions be read, before the wait."""


class ReduceRoute(ABC):
    """A reduce-scatter bound to a layout; gradients differ from step to step."""

    on_stream: bool = False
    """As that of a gather's route."""
    is_awaited: bool = True
    """Whether its transfers need :meth:`Pending.wait`, beside the order of streams."""

    def prepare(self, sources: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """What :meth:`start` is to be given in place of ``sources``: memory is taken here."""
        return sources

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
        """Bytes that leave this rank for these sources."""

    def scratch_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """Bytes of memory beside sources and sums until the wait; a plan asks, on the meta device.

        By default what :meth:`prepare` makes of the sources.
        """
        made = zip(self.prepare(sources), sources, strict=True)
        return sum(new.nbytes for new, old in made if new is not None and new is not old)

    def in_tree(self) -> ReduceRoute | None:
        """The same route with sums over a binary tree of the ranks; ``None`` where it cannot.

        Node ``i`` of a level is the sum of nodes ``2 i`` and ``2 i + 1`` below it, in the dtype of
        sums; the ranks are a power of two.
        """
        return None

    def answer(self, peer: int, takes_part: Sequence[bool], dtype: torch.dtype) -> Pending:
        """Take part, with zeros, in the reduction of the pieces that ``peer`` started.

        What it sends is forgotten. For a route whose transfers can be ended when ranks turn out to
        have gradients of different pieces: every rank answers every other one. Without an override
        this is never called: a reduction starts when ranks are known to agree.
        """
        raise NotImplementedError


class OwnerRoute(ABC):
    """Whole tensors to one rank of an axis, and parts of them back.

    ``key`` tells transfers apart that are under way at once; all ranks call alike. Tensors are flat
    and contiguous, and must not change before the wait.
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
        """Bring ``parts[r]`` of ``owner``, who alone has them, into ``out`` on rank ``r``.

        No part has more than ``most`` elements.
        """

    @abstractmethod
    def gather(
        self, key: int, owner: int, source: Tensor, parts: Sequence[Tensor] | None, most: int
    ) -> Pending:
        """Bring ``source`` of rank ``r`` into ``parts[r]`` on ``owner``: a scatter mirrored."""

    @abstractmethod
    def broadcast(self, key: int, owner: int, value: Tensor) -> Pending:
        """Bring ``value`` of ``owner`` into that of all ranks."""


class Transport(ABC):
    """Moves bytes between the ranks of one shard axis."""

    name: str
    """As plans show it; the same on every rank."""
    rank: int
    """This rank's position on the shard axis, or in its block."""
    size: int
    """Ranks that take part."""
    staging_bytes: int
    """Chunks below this many bytes are packed: one more message costs more than a small copy."""

    staging_reason: str = "built in"
    """Where :attr:`staging_bytes` comes from, as ``describe()`` says it."""

    can_coalesce: bool = False
    """Whether :attr:`coalesces` may be chosen, before routes are made."""

    coalesces: bool = False
    """Whether the transfers of a group are one launch."""

    exchanges_on_stream: bool = False
    """As ``on_stream`` of a route, for :meth:`exchange`."""

    @abstractmethod
    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> GatherRoute:
        """Bind an all-gather. ``tag`` is equal on all ranks and unique to the group."""

    @abstractmethod
    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> ReduceRoute:
        """Bind a reduce-scatter whose sums are kept in ``dtype``."""

    def owner_route(self, dtype: torch.dtype, tag: int) -> OwnerRoute:
        """A way for whole gradients to ranks that own them, with sums in ``dtype``.

        Without an override there is none, and gradients land on shards alone.
        """
        del dtype, tag
        raise UnsupportedError(
            f"transport '{self.name}' has no owner_route, so it cannot send a whole gradient to "
            "one rank. Remove the plugin whose gradients land on owners, or use another transport."
        )

    @abstractmethod
    def block(self, size: int) -> Transport:
        """The same way among the block of ``size`` consecutive ranks that holds this one.

        Every rank of the axis asks for its block at the same point.
        """

    def use_lanes(self, lanes: Lanes) -> None:
        """Run transfers on ``lanes`` from now on, which all groups of a root share.

        For transports on accelerators whose collectives run on streams; nothing is in flight.
        """

    def use_turns(self, turns: Turns) -> None:
        """Tell transfers of different turns apart from now on, where they have tags."""

    def separate_reductions(self, enable: bool) -> None:
        """Whether reductions get a communicator of their own, so as not to queue behind gathers."""

    @abstractmethod
    def exchange(self, payloads: Tensor, received: Tensor) -> Pending:
        """All-to-all of equal rows: row ``r`` of ``payloads`` goes to rank ``r``."""


DONE: Pending = ARRIVED
"""A transfer that needed no waiting."""
