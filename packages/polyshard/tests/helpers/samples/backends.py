"""Collectives backends, right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import polyshard
from polyshard import Plugin, hookimpl
from polyshard.plugins.builtin import DefaultBackend
from polyshard.plugins.seams import CollectivesBackend, GroupInfo
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Transport, choose_transport
from polyshard.transport.base import Extents, GatherPiece, GatherRoute, Pending, ReduceRoute
from samples.verdict import Right, Samples, Wrong, variant


class Around(Transport):
    """Counts the routes of another transport."""

    def __init__(self, roles: MeshRoles, device: torch.device) -> None:
        self.inner = choose_transport(roles, device)
        self.name, self.rank, self.size = "sample", self.inner.rank, self.inner.size
        self.staging_bytes = self.inner.staging_bytes
        self.routes = 0

    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> GatherRoute:
        self.routes += 1
        return self.inner.gather_route(pieces, tag)

    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> ReduceRoute:
        self.routes += 1
        return self.inner.reduce_route(extents, dtype, tag)

    def block(self, size: int) -> Transport:
        return self.inner.block(size)

    def exchange(self, payloads: Tensor, received: Tensor) -> Pending:
        return self.inner.exchange(payloads, received)


class Backend(CollectivesBackend):
    name = "sample"

    def __init__(self, made: Any) -> None:
        self.made = made

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        transport: Transport = self.made(roles, group.device)
        return transport


class Wrapping(Plugin):
    name = "sample"
    made: ClassVar[Any] = Around

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> CollectivesBackend | None:
        return Backend(self.made)


class Standard(Wrapping):
    """What the engine would take, under a name of its own."""

    made = staticmethod(choose_transport)


class Abstaining(Wrapping):
    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> CollectivesBackend | None:
        return None


class _Named(DefaultBackend):
    name = "sample"


class Inheriting(Wrapping):
    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> CollectivesBackend | None:
        return _Named()


class _Outer(CollectivesBackend):
    """Wraps whatever moves bytes."""

    name = "sample"

    def __init__(self, inner: CollectivesBackend) -> None:
        self.inner = inner

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        transport = self.inner.bind(group, roles)
        transport.name = f"sample {transport.name}"
        return transport


class GoingAround(Plugin):
    """Claims nothing."""

    name = "sample"

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> polyshard.Around[Any]:
        return polyshard.Around(_Outer)


class StayingOut(GoingAround):
    """Wraps nothing that it is given."""

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> polyshard.Around[Any]:
        return polyshard.Around(lambda inner: inner)


# Wrong -------------------------------------------------------------------------------------------


class _Route(GatherRoute):
    """Another route with something done when it has arrived."""

    def __init__(self, inner: GatherRoute, pieces: Sequence[GatherPiece], change: Any) -> None:
        self.inner, self.pieces, self.change = inner, pieces, change
        self.sent_bytes, self.received_bytes = inner.sent_bytes, inner.received_bytes
        self.pending: Pending | None = None

    def start(self) -> Pending:
        self.pending = self.inner.start()
        return self

    def wait(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        for piece in self.pieces:
            self.change(piece.region)


class _Reducing(ReduceRoute):
    """Another route with something done to its sums."""

    def __init__(self, inner: ReduceRoute, change: Any) -> None:
        self.inner, self.change = inner, change
        self.outs: Sequence[Tensor] = ()
        self.pending: Pending | None = None

    def start(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Pending:
        self.outs, self.pending = outs, self.inner.start(sources, outs)
        return self

    def wait(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        for out in self.outs:
            self.change(out)

    def sent_bytes(self, sources: Sequence[Tensor | None]) -> int:
        return self.inner.sent_bytes(sources)


class _Forgetting(Around):
    """Loses the chunks of the last rank."""

    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> GatherRoute:
        inner = super().gather_route(pieces, tag)
        return _Route(inner, pieces, lambda region: region[-1].zero_())


class _Shuffling(Around):
    """Delivers chunks in another order."""

    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> GatherRoute:
        inner = super().gather_route(pieces, tag)
        return _Route(inner, pieces, lambda region: region.copy_(region.flip(0)))


class _Averaging(Around):
    """Averages, which is the engine's part."""

    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> ReduceRoute:
        inner = super().reduce_route(extents, dtype, tag)
        return _Reducing(inner, lambda out: out.div_(self.size))


class _Rounding(Around):
    """Sums in fewer bits than it was told."""

    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> ReduceRoute:
        inner = super().reduce_route(extents, dtype, tag)
        return _Reducing(inner, lambda out: out.copy_(out.bfloat16()))


class _RankStaging(Around):
    """Packs less on some ranks than on others."""

    def __init__(self, roles: MeshRoles, device: torch.device) -> None:
        super().__init__(roles, device)
        if roles.shard_rank:
            self.staging_bytes = 1


class SomeRanks(Wrapping):
    """Moves bytes on one rank."""

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> CollectivesBackend | None:
        return Backend(self.made) if group.rank == 0 else None


TRAIN = "test_two_ranks_train_like_without"


class FirstOnly(GoingAround):
    """Wraps on one rank."""

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> polyshard.Around[Any]:
        return polyshard.Around(lambda inner: inner if group.rank else _Outer(inner))


SAMPLES = Samples(
    right=[
        Right(Wrapping),
        Right(Standard),
        Right(Inheriting),
        Right(Abstaining),
        Right(GoingAround),
        Right(StayingOut),
    ],
    wrong=[
        Wrong(FirstOnly, "test_answers_are_the_same_on_every_rank"),
        Wrong(variant(Wrapping, "Forgetting", made=_Forgetting), TRAIN),
        Wrong(variant(Wrapping, "Shuffling", made=_Shuffling), TRAIN),
        Wrong(variant(Wrapping, "Averaging", made=_Averaging), TRAIN),
        Wrong(variant(Wrapping, "Rounding", made=_Rounding), TRAIN),
        Wrong(variant(Wrapping, "RankStaging", made=_RankStaging), TRAIN),
        Wrong(SomeRanks, "test_answers_are_the_same_on_every_rank"),
    ],
)
