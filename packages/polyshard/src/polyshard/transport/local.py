"""A world of one: nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.transport.base import (
    DONE,
    Extents,
    GatherPiece,
    GatherRoute,
    OwnerRoute,
    Pending,
    ReduceRoute,
    Transport,
)


class LocalGather(GatherRoute):
    """Puts the only chunk in place, unless it rests there already."""

    sent_bytes = 0
    received_bytes = 0

    def __init__(self, pieces: Sequence[GatherPiece]) -> None:
        """Skip pieces whose region is the shard itself."""
        apart = [p for p in pieces if p.source.data_ptr() != p.region.data_ptr()]
        self._sources = [p.source for p in apart]
        self._targets = [p.region[0] for p in apart]

    @override
    def start(self) -> Pending:
        if self._sources:
            torch._foreach_copy_(self._targets, self._sources)
        return DONE


class LocalReduce(ReduceRoute):
    """The sum over one rank is the gradient itself."""

    @override
    def in_tree(self) -> LocalReduce:
        return self

    @override
    def answer(self, peer: int, takes_part: Sequence[bool], dtype: torch.dtype) -> Pending:
        del peer, takes_part, dtype
        return DONE

    @override
    def sent_bytes(self, sources: Sequence[Tensor | None]) -> int:
        del sources
        return 0

    @override
    def start(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Pending:
        """Copy (and cast) each gradient to where its sum belongs."""
        for source, out in zip(sources, outs, strict=True):
            if source is not None:
                out[: source.numel()].copy_(source)
        return DONE


class LocalOwner(OwnerRoute):
    """The only rank owns everything."""

    @override
    def reduce(self, key: int, owner: int, source: Tensor, out: Tensor | None) -> Pending:
        del key, owner
        assert out is not None
        out.copy_(source)
        return DONE

    @override
    def scatter(
        self, key: int, owner: int, parts: Sequence[Tensor] | None, out: Tensor, most: int
    ) -> Pending:
        del key, owner, most
        assert parts is not None
        out.copy_(parts[0])
        return DONE

    @override
    def gather(
        self, key: int, owner: int, source: Tensor, parts: Sequence[Tensor] | None, most: int
    ) -> Pending:
        del key, owner, most
        assert parts is not None
        parts[0].copy_(source)
        return DONE

    @override
    def broadcast(self, key: int, owner: int, value: Tensor) -> Pending:
        del key, owner, value
        return DONE


class LocalTransport(Transport):
    """No communication at all: a shard axis of one rank."""

    name = "local"
    rank = 0
    size = 1
    staging_bytes = 0

    @override
    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> LocalGather:
        del tag
        return LocalGather(pieces)

    @override
    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> LocalReduce:
        del extents, dtype, tag
        return LocalReduce()

    @override
    def owner_route(self, dtype: torch.dtype, tag: int) -> LocalOwner:
        del dtype, tag
        return LocalOwner()

    @override
    def block(self, size: int) -> LocalTransport:
        assert size == 1
        return self

    @override
    def exchange(self, payloads: Tensor, received: Tensor) -> Pending:
        received.copy_(payloads)
        return DONE
