"""A payload that is sent again needs no shard: storages are not asked for what is not read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from toy_codecs import Keeping, KeptFactory
from toy_models import chain, run_chain
from typing_extensions import override

from polyshard import hookimpl
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import GroupInfo, StorageFactory
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import ranks


class Far(DeviceStorage):
    """Rests apart from its view, and counts how often it is brought near."""

    prefetch_units = 1

    def __init__(self, log: list[str], number: int) -> None:
        super().__init__()
        self._log, self._number = log, number
        self._is_near = False

    @override
    def rest(self, shard: Tensor) -> Tensor:
        self._resting = shard.clone()
        super().rest(shard)
        return self._resting

    @override
    def prefetch(self) -> None:
        self._read()

    @override
    def fetch(self) -> None:
        self._read()

    def _read(self) -> None:
        if not self._is_near:
            self._log.append(f"read {self._number}")
            self.view().copy_(self._resting)
            self._is_near = True

    @override
    def release(self) -> None:
        self.view().fill_(float("nan"))
        self._is_near = False


class Serving(Far):
    """Lets a codec read what rests."""

    def __init__(self, log: list[str], number: int) -> None:
        super().__init__(log, number)
        self._serves = False

    def serve_codec(self, enable: bool) -> None:
        self._serves = enable

    @override
    def view(self) -> Tensor:
        return self._resting if self._serves else super().view()

    @override
    def _read(self) -> None:
        if not self._serves:
            super()._read()

    @override
    def release(self) -> None:
        if not self._serves:
            super().release()


class FarFactory(StorageFactory):
    name, settings = "far", ""

    def __init__(self, kind: type[Far]) -> None:
        self.log: list[str] = []
        self._kind, self._count = kind, 0

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Far:
        self._count += 1
        return self._kind(self.log, self._count)


class FarKeeping(Keeping):
    """A far storage, and a codec that keeps payloads (or none)."""

    def __init__(self, kind: type[Far], *, keeps: bool = True) -> None:
        super().__init__()
        self.storage = FarFactory(kind)
        self._keeps = keeps

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> FarFactory:
        return self.storage

    @hookimpl
    @override
    def polyshard_gather_codec(self, group: GroupInfo) -> KeptFactory | None:  # type: ignore[override]
        return self.factory if self._keeps else None


@ranks(2)
def test_a_kept_payload_leaves_the_shard_where_it_rests(rank: int, size: int) -> None:
    plugin, plain = FarKeeping(Far), FarKeeping(Far, keeps=False)
    model, expected = chain(plugin, 3), chain(plain, 3)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, expected)]
    for _ in range(4):
        plugin.storage.log.clear()
        plain.storage.log.clear()
        assert run_chain(model) == run_chain(expected)
        assert sorted(plugin.storage.log) == ["read 1", "read 2", "read 3"]  # in forward
        # The last layer is still there in backward, but for what prefetching brings near.
        assert len(plain.storage.log) >= 5
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_a_kept_payload_follows_what_rests(rank: int, size: int) -> None:
    """A write between forward and backward is seen, and so is one past the version counters."""
    models = [chain(FarKeeping(Far), 3), chain(FarKeeping(Far, keeps=False), 3)]
    for _ in range(2):
        assert run_chain(models[0]) == run_chain(models[1])
    gradients = []
    for each in models:
        each.zero_grad()
        loss = each(torch.ones(2, 4)).square().sum()
        with torch.no_grad():
            each[1].weight.mul_(2.0)  # type: ignore[operator]
        loss.backward()
        weight: Any = each[0].weight
        gradients.append(weight.grad.full_tensor())
    assert torch.equal(*gradients)
    for each in models:
        weight = each[1].weight
        weight.data.mul_(2.0)
    assert run_chain(models[0]) == run_chain(models[1])


@ranks(2)
def test_a_codec_may_read_a_shard_where_it_rests(rank: int, size: int) -> None:
    plugin, plain = FarKeeping(Serving), FarKeeping(Serving, keeps=False)
    model, expected = chain(plugin, 3), chain(plain, 3)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, expected)]
    for step in range(3):
        for _ in range(2):
            assert run_chain(model) == run_chain(expected)
        # Looking whether a shard changed does not bring it near either.
        encoded = [bound.encoded for bound in plugin.factory.bound if bound.encoded]
        assert encoded == [step + 1] * 3
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not plugin.storage.log
    assert plain.storage.log
