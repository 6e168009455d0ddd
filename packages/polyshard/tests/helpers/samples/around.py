"""Wrappers of another plugin's codec, right and wrong; given with what they wrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from polyshard import Around, BoundGatherCodec, GatherCodec, Plugin, hookimpl
from polyshard.plugins.seams import GroupInfo
from polyshard.sharding.layout import GroupLayout
from samples import gather
from samples.verdict import Right, Samples, Wrong


class Passing(BoundGatherCodec):
    """Passes on what another codec makes, with eight bytes of its own behind it."""

    def __init__(self, inner: BoundGatherCodec) -> None:
        self.inner = inner
        self.keeps_payload = inner.keeps_payload
        self.payload_bytes = inner.payload_bytes + 8

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        self.inner.encode(shard, payload[:-8])
        payload[-8:] = 7

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        assert bool((payloads[:, -8:] == 7).all())
        self.inner.decode(payloads[:, :-8].contiguous(), regions)


class Dropping(Passing):
    """Forgets what the codec inside has written."""

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        super().encode(shard, payload)
        payload[:-8] = 0


class Meddling(Passing):
    """Changes values that it should pass on."""

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads, regions)
        for region in regions:
            region.mul_(1.5)


class Unequal(Passing):
    """Adds more bytes on some ranks."""

    def __init__(self, inner: BoundGatherCodec, rank: int) -> None:
        super().__init__(inner)
        self.payload_bytes += 8 * rank


class Jittering(Passing):
    """Writes something else every time."""

    written = 0

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        super().encode(shard, payload)
        Jittering.written += 1
        payload[-1] = Jittering.written % 200

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        self.inner.decode(payloads[:, :-8].contiguous(), regions)


class Partial(Passing):
    """Leaves out the last rank."""

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        if len(payloads) > 1:
            payloads, regions = payloads[:-1], [region[:-1] for region in regions]
        super().decode(payloads, regions)


class Codec(GatherCodec):
    name = "outer"

    def __init__(self, inner: GatherCodec, bound: Callable[..., Passing]) -> None:
        self.inner, self.bound = inner, bound

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundGatherCodec | None:
        inner = self.inner.bind(group, layout)
        if inner is None:  # native: nothing to wrap
            return None
        if self.bound is Unequal:
            return Unequal(inner, group.rank)
        return self.bound(inner)


class Outer(Plugin):
    name = "outer"

    def __init__(self, bound: Callable[..., Passing]) -> None:
        self.bound = bound

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> Any:
        return Around(partial(Codec, bound=self.bound))


def both(bound: Callable[..., Passing], inner: Callable[[], object]) -> list[object]:
    return [Outer(bound), inner()]


def alone() -> object:
    return Outer(Passing)


def sample(bound: Callable[..., Passing], inner: Callable[[], object] = gather.Exact) -> Any:
    made = partial(both, bound, inner)
    made.__name__ = f"{bound.__name__}-{inner.__name__}"  # type: ignore[attr-defined]
    return made


SAMPLES = Samples(
    right=[
        Right(sample(Passing)),
        Right(sample(Passing, gather.Lossy), tolerance=2.0**-8),
        Right(sample(Passing, gather.NoneBound)),
        Right(alone),
    ],
    wrong=[
        Wrong(sample(Dropping), "test_gather_round_trip"),
        Wrong(sample(Meddling), "test_gather_round_trip"),
        Wrong(sample(Partial), "test_gather_round_trip"),
        Wrong(sample(Unequal), "test_answers_are_the_same_on_every_rank"),
        Wrong(sample(Jittering), "test_gather_is_deterministic"),
    ],
)
