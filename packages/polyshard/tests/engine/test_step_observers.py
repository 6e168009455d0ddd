"""Observers that ask learn of units that compute, and of what moves beside collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from toy_meeting import await_all
from toy_observers import Watching
from toy_storage import Away, AwayFactory

from polyshard import Plugin, describe, fully_shard, hookimpl, stats
from polyshard.engine.root import groups_of, unit_of
from polyshard.plugins.seams import GroupInfo, Observer
from polyshard_testing import ranks


class Asking(Plugin, Observer):
    """Writes down what only those hear who ask."""

    name = "asking"

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.moved: list[tuple[Any, ...]] = []
        self.told: list[tuple[str, ...]] = []

    @hookimpl
    def polyshard_observer(self) -> Observer:
        return self

    def on_start(self, group: str, what: str) -> None:
        self.told.append(("start", what, group))

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self.told.append(("gather", group))

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        self.told.append(("reduce", group))

    def on_forward(self, unit: str) -> None:
        self.heard.append(("forward", unit))

    def on_forward_end(self, unit: str) -> None:
        self.heard.append(("end", unit))

    def on_backward(self, unit: str) -> None:
        self.heard.append(("backward", unit))

    def on_backward_end(self, unit: str) -> None:
        self.heard.append(("backward end", unit))

    def on_broken(self) -> None:
        self.heard.append(("broken",))

    def on_replicas_summed(self, group: str, payload_bytes: int, seconds: float) -> None:
        assert seconds > 0
        self.moved.append(("replicas", group, payload_bytes))

    def on_staged(self, group: str, direction: str, num_bytes: int, seconds: float) -> None:
        assert seconds > 0
        self.moved.append((direction, group, num_bytes))


class Failing(nn.Linear):
    """Raises when told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            # a rank that is behind would learn of this before it gets here
            await_all("in forward", dist.get_world_size())
            raise ValueError("on purpose")
        return super().forward(x)


def two_layers(plugin: object, **given: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 6), Failing(6, 5))
    for layer in model:
        fully_shard(layer, plugins=[plugin], **given)
    return fully_shard(model, plugins=[plugin], **given)


FORWARD = [
    ("forward", "(root)"),
    *(("forward", "0"), ("end", "0")),
    *(("forward", "1"), ("end", "1")),
    ("end", "(root)"),
]


@ranks(2)
def test_units_compute_inside_of_the_root(rank: int, size: int) -> None:
    """The root has no parameters of its own, and computes nevertheless."""
    plugin = Asking()
    model = two_layers(plugin)
    for _ in range(2):
        plugin.heard.clear()
        loss = model(torch.ones(2, 8)).sum()
        assert plugin.heard == FORWARD
        loss.backward()
        backward = plugin.heard[len(FORWARD) :]
        units = ["(root)", "0", "1"]
        assert sorted(u for what, u in backward if what == "backward") == units
        assert sorted(u for what, u in backward if what == "backward end") == units
        assert backward.index(("backward end", "1")) < backward.index(("backward", "0"))


@ranks(2)
def test_a_recomputed_forward_is_heard_again(rank: int, size: int) -> None:
    plugin = Asking()
    model = two_layers(plugin)
    x = torch.ones(2, 8, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert [one for one in plugin.heard if "backward" not in one[0]] == 2 * FORWARD


@ranks(2)
def test_what_is_broken_off_is_told(rank: int, size: int) -> None:
    plugin = Asking()
    model = two_layers(plugin)
    model[1].fails = True
    with pytest.raises(ValueError, match="on purpose"):
        model(torch.ones(2, 8))
    assert plugin.heard == [*FORWARD, ("broken",)]
    model.reset_iter_state()  # on a device the failure ended the communicators
    model[1].fails = False
    plugin.heard.clear()
    model(torch.ones(2, 8)).sum().backward()
    whole = list(plugin.heard)
    assert ("broken",) not in whole

    def fail(gradient: Tensor) -> None:
        await_all("in backward", size)
        raise ValueError("on purpose")

    plugin.heard.clear()
    out = model[0](torch.ones(2, 8, requires_grad=True))
    out.register_hook(fail)
    with pytest.raises((ValueError, RuntimeError)):
        model[1](out).sum().backward()
    model.reset_iter_state()
    assert plugin.heard[-1] == ("broken",)
    begun, ended = (
        [u for what, *u in plugin.heard if what == kind] for kind in ("backward", "backward end")
    )
    assert sorted(begun) == sorted(ended)
    plugin.heard.clear()
    model(torch.ones(2, 8)).sum().backward()
    assert plugin.heard == whole


@ranks(2)
def test_transfers_are_told_before_they_start(rank: int, size: int) -> None:
    plugin = Asking()
    model = two_layers(plugin)
    model(torch.ones(2, 8)).sum().backward()
    starts, done = plugin.told[::2], plugin.told[1::2]
    assert [("start", *one) for one in done] == starts
    assert sorted(done) == sorted(
        [("gather", "0"), ("gather", "1")] * 2 + [("reduce", n) for n in "01"]
    )


@ranks(2)
def test_sums_over_replicas_are_told_where_they_are_made(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 1), mesh_dim_names=("replicate", "shard")
    )
    plugin = Asking()
    model = two_layers(plugin, mesh=mesh)
    sizes = {group.name: group.shard_bytes for group in describe(model).groups}
    assert sizes["0"] >= 4 * (8 * 6 + 6)  # and what aligns them
    model.set_requires_all_reduce(False)
    model(torch.ones(2, 8)).sum().backward()
    assert plugin.moved == []
    model.set_requires_all_reduce(True)
    model(torch.ones(2, 8)).sum().backward()
    assert plugin.moved == [("replicas", name, sizes[name]) for name in ("1", "0")]


class Around(Away):
    """Moves gradients as well."""

    def place_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.clone()


class AroundFactory(AwayFactory):
    def bind(self, group: GroupInfo, layout: Any) -> Away:
        return Around()


class Elsewhere(Asking):
    name = "elsewhere"

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> AwayFactory | None:
        return AroundFactory() if group.parameters[0].shape == (6, 8) else None


@ranks(2)
def test_storages_elsewhere_are_staged(rank: int, size: int) -> None:
    plugin = Elsewhere()
    model = two_layers(plugin)
    model(torch.ones(2, 8)).sum().backward()
    num_bytes = describe(model).groups[0].shard_bytes
    assert num_bytes >= 4 * (3 * 8 + 3)  # rows of this rank, and what aligns them
    staged = [("fetch", "0", num_bytes)] * 2 + [("place", "0", num_bytes)]
    assert plugin.moved == staged


@ranks(2)
def test_who_does_not_ask_costs_nothing(rank: int, size: int) -> None:
    model = two_layers(Watching())
    model(torch.ones(2, 8)).sum().backward()
    assert [unit_of(module).watch for module in (model, *model)] == [None] * 3  # type: ignore[union-attr]
    for group in groups_of(model):
        assert group.meter.step_observers == ()
        assert group.meter.fetching(group.shards) == group.shards.fetch


@ranks(2)
def test_stats_are_a_table(rank: int, size: int) -> None:
    """By hand: one of two ranks sends half of 8 x 512 elements of 4 bytes, twice, and reduces."""
    model = nn.Sequential(nn.Linear(512, 8, bias=False))
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(1, 512)).sum().backward()
    head, row, total = str(stats(model)).splitlines()
    assert head.split() == ["group", "gathers", "reductions", "sent", "received", "waited"]
    assert row.split()[:7] == ["0", "2", "1", "24.0", "KiB", "24.0", "KiB"]
    assert total.startswith("this rank sent 24.0 KiB, received 24.0 KiB and waited ")
