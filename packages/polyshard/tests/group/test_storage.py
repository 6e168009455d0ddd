"""What storages may ask for: to see their parameters, and to get gradients once an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from toy_models import reset_together
from typing_extensions import override

from polyshard import Plugin, fully_shard, hookimpl
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import GroupInfo, StorageFactory
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import ranks


class Watched(DeviceStorage):
    """Counts what it is given."""

    def __init__(self, *, holds: bool) -> None:
        super().__init__()
        self.holds_gradients = holds
        self.moves = 0
        self.held: list[list[Tensor]] = []

    def hold(self, parameters: Sequence[Tensor]) -> None:
        self.held.append(list(parameters))

    @override
    def place_gradient(self, gradient: Tensor) -> Tensor:
        self.moves += 1
        return gradient.clone()


class Watching(Plugin, StorageFactory):
    name, settings = "watching", ""

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds
        self.storages: list[Watched] = []

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Watched:
        self.storages.append(Watched(holds=self._holds))
        return self.storages[-1]

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> Watching:
        return self


class Model(nn.Module):
    """Two units; each input says which parameters it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.extra = nn.Parameter(torch.full((5,), 0.5))

    def forward(self, x: Tensor, uses: str) -> Tensor:
        x = self.first(x) if "f" in uses else x
        x = self.second(x) if "s" in uses else x
        return x * self.extra if "e" in uses else x


def sharded(plugin: Watching | None) -> Any:
    torch.manual_seed(0)
    model = Model()
    plugins = [plugin] if plugin else []
    fully_shard(model.first, plugins=plugins)
    fully_shard(model.second, plugins=plugins)
    return fully_shard(model, plugins=plugins)


def backwards(model: Any, uses: Sequence[str], rank: int) -> list[Tensor | None]:
    for index, use in enumerate(uses):
        model.set_is_last_backward(index == len(uses) - 1)
        model(torch.full((2, 5), 1.0 + rank + index, requires_grad=True), use).sum().backward()
    found = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    return [None if g is None else g.full_tensor() for g in found]


@ranks(2)
def test_gradients_of_all_backwards_come_once(rank: int, size: int) -> None:
    """The same sums, whichever backwards reach a parameter; moved once a group and iteration."""
    for uses in (["fse"] * 3, ["f", "se", "fs"], ["fse", "s", "s"], ["fs", "e"], ["e", "", "f"]):
        plain, away = Watching(holds=False), Watching(holds=True)
        expected = [backwards(sharded(plain), u, rank) for u in (uses,)]
        model = sharded(away)
        for _ in range(2):
            found = [backwards(model, uses, rank)]
            for one, other in zip(found[0], expected[0], strict=True):
                assert (one is None) == (other is None), uses
                assert one is None or other is None or torch.equal(one, other), uses
        reached = [name for name in "fse" if any(name in use for use in uses)]
        assert sum(s.moves for s in away.storages) == 2 * len(reached)
        assert sum(s.moves for s in plain.storages) == sum(len(use) for use in uses)


@ranks(2)
def test_a_reset_forgets_what_was_held(rank: int, size: int) -> None:
    """What was held goes with an iteration that is reset."""
    model = sharded(Watching(holds=True))
    expected = backwards(model, ["fse"], rank)
    model.set_is_last_backward(False)
    model(torch.ones(2, 5), "fse").sum().backward()
    reset_together(model)
    found = backwards(model, ["fse"], rank)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@ranks(2)
def test_storages_see_their_parameters(rank: int, size: int) -> None:
    plugin = Watching(holds=False)
    model = sharded(plugin)
    for storage, unit in zip(plugin.storages, (model.first, model.second), strict=False):
        (seen,) = storage.held
        assert {id(p) for p in seen} == {id(p) for p in unit.parameters()}
    model.to(torch.float64)
    model(torch.ones(2, 5, dtype=torch.float64), "fse")
    for storage in plugin.storages:
        assert len(storage.held) == 2
        assert all(p.dtype == torch.float64 for p in storage.held[1])
