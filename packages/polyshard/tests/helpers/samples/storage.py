"""Storages, right and wrong."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from polyshard import Plugin, hookimpl
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import GroupInfo, ShardStorage, StorageFactory
from polyshard.sharding.layout import GroupLayout
from samples.verdict import Right, Samples, Wrong, variant


class Apart(ShardStorage):
    """Keeps the shard in one place, and brings it to another for each gather."""

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        self.near = torch.full((layout.shard_numel,), float("nan"), dtype=group.orig_dtype)
        self.resting = self.near

    def rest(self, shard: Tensor) -> Tensor:
        self.resting = shard
        return shard

    def view(self) -> Tensor:
        return self.near

    def fetch(self) -> None:
        self.near.copy_(self.resting)

    def release(self) -> None:
        self.near.fill_(float("nan"))


class Around(ShardStorage):
    """Counts what another storage does."""

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        del group, layout
        self.inner = DeviceStorage()
        self.fetches = 0

    def rest(self, shard: Tensor) -> Tensor:
        return self.inner.rest(shard)

    def view(self) -> Tensor:
        return self.inner.view()

    def fetch(self) -> None:
        self.fetches += 1
        self.inner.fetch()

    def release(self) -> None:
        self.inner.release()

    def place_gradient(self, gradient: Tensor) -> Tensor:
        return self.inner.place_gradient(gradient)


class Factory(StorageFactory):
    name = "sample"

    def __init__(self, made: Any) -> None:
        self.made = made

    def bind(self, group: GroupInfo, layout: GroupLayout) -> ShardStorage:
        storage: ShardStorage = self.made(group, layout)
        return storage


class Moving(Plugin):
    name = "sample"
    made: ClassVar[Any] = Apart

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> StorageFactory | None:
        return Factory(self.made)


class Abstaining(Moving):
    """Leaves groups of few parameters to the engine: all of them, here."""

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> StorageFactory | None:
        return Factory(self.made) if len(group.parameters) > 100 else None


class Checked(Apart):
    """Knows what it keeps by a checksum, which it takes anew when the shard was written."""

    sum: float | None = None

    def rest(self, shard: Tensor) -> Tensor:
        self.sum = None
        return super().rest(shard)

    def changed(self) -> None:
        self.sum = None

    def fetch(self) -> None:
        super().fetch()
        found = float(self.resting.double().sum())
        if self.sum is not None and self.sum != found:
            raise OSError("the shard has changed by itself")
        self.sum = found


# Wrong -------------------------------------------------------------------------------------------


class _NewView(Apart):
    """Shows the shard in another tensor every time."""

    def view(self) -> Tensor:
        return self.near.clone()


class _Stale(Apart):
    """Fetches once."""

    fetched = False

    def fetch(self) -> None:
        if not self.fetched:
            super().fetch()
        self.fetched = True

    def release(self) -> None:
        """What was fetched stays."""


class _Deaf(Apart):
    """Rests in a copy that the optimizer never sees."""

    def rest(self, shard: Tensor) -> Tensor:
        super().rest(shard)
        return shard.clone()


class _Halving(Apart):
    """Places other gradients than it was given."""

    def place_gradient(self, gradient: Tensor) -> Tensor:
        return gradient / 2


class _OneGradient(Apart):
    """Places every gradient in the same memory."""

    placed: Tensor | None = None

    def place_gradient(self, gradient: Tensor) -> Tensor:
        if self.placed is None:
            self.placed = torch.empty_like(gradient)
        return self.placed.copy_(gradient)


class _Narrow(Apart):
    """Shows the shard in another dtype."""

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        super().__init__(group, layout)
        self.near = self.near.double()


class _Shared(Apart):
    """One place for the shards of all groups."""

    places: ClassVar[dict[int, Tensor]] = {}

    def rest(self, shard: Tensor) -> Tensor:
        self.resting = self.places.setdefault(shard.numel(), shard)
        return self.resting.copy_(shard)


class _Unaware(Checked):
    """Takes every write for damage."""

    def changed(self) -> None:
        """Nothing."""


class SomeRanks(Moving):
    """Claims the storage on one rank."""

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> StorageFactory | None:
        return Factory(self.made) if group.rank == 0 else None


SAMPLES = Samples(
    right=[
        Right(Moving),
        Right(Abstaining),
        Right(variant(Moving, "Wrapping", made=Around)),
        Right(variant(Moving, "Checking", made=Checked)),
    ],
    wrong=[
        Wrong(variant(Moving, "NewView", made=_NewView), "test_storage_life_cycle"),
        Wrong(variant(Moving, "Stale", made=_Stale), "test_storage_life_cycle"),
        Wrong(variant(Moving, "Deaf", made=_Deaf), "test_storage_life_cycle"),
        Wrong(variant(Moving, "Halving", made=_Halving), "test_storage_life_cycle"),
        Wrong(variant(Moving, "Narrow", made=_Narrow), "test_storage_life_cycle"),
        Wrong(variant(Moving, "Shared", made=_Shared), "test_storages_of_two_groups_do_not_mix"),
        Wrong(
            variant(Moving, "OneGradient", made=_OneGradient), "test_two_backwards_before_a_step"
        ),
        Wrong(variant(Moving, "Unaware", made=_Unaware), "test_storage_life_cycle"),
        Wrong(SomeRanks, "test_answers_are_the_same_on_every_rank"),
    ],
)
