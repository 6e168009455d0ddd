"""Wrappers: answers that claim nothing, but wrap the part that has the role."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from toy_codecs import BytesGather, Codecs
from toy_groups import contributions
from toy_storage import Resting

from polyshard import (
    Around,
    CollectivesBackend,
    GatherCodec,
    Plugin,
    StorageFactory,
    describe,
    fully_shard,
    hookimpl,
)
from polyshard.errors import ConflictError, PlanMismatchError, PluginError
from polyshard.plugins.contributions import COLLECTIVES, GATHER_CODEC, STORAGE
from polyshard.plugins.seams import BoundGatherCodec, GroupInfo, ShardStorage
from polyshard.sharding.layout import GroupLayout
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Transport
from polyshard_testing import ranks


class Outer(CollectivesBackend):
    """Says that it was there."""

    name = ""
    settings = ""
    notices: tuple[str, ...] = ()

    def __init__(self, name: str, settings: str, inner: CollectivesBackend) -> None:
        self.name, self.settings, self.inner = name, settings, inner
        self.notices = (f"{name} around {inner.name}",)

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        transport = self.inner.bind(group, roles)
        transport.staging_reason += f", seen by {self.name}"
        return transport


class Wrapping(Plugin):
    """Wraps the backend, unless that is one it cannot wrap or leaves alone."""

    def __init__(self, name: str, settings: str = "", refuses: str = "", leaves: str = "") -> None:
        self.name = name  # type: ignore[misc]
        self.how, self.refuses, self.leaves = settings, refuses, leaves

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> Around[CollectivesBackend]:
        return Around(self.around)

    def around(self, inner: CollectivesBackend) -> CollectivesBackend:
        if inner.name == self.refuses:
            raise PluginError(f"'{self.name}' cannot go around '{inner.name}'")
        return inner if inner.name == self.leaves else Outer(self.name, self.how, inner)


def nesting(*plugins: object) -> list[str]:
    return [part.name for part in contributions(*plugins).all(COLLECTIVES)]


@given(order=st.permutations(["count", "delay", "claim", "codecs"]), engine=st.booleans())
def test_every_order_of_passing_gives_one_nesting(order: list[str], engine: bool) -> None:
    made: dict[str, object] = {
        "count": Wrapping("count"),
        "delay": Wrapping("delay"),
        "codecs": Codecs(),
    }
    if not engine:
        made["claim"] = Resting()
    found = nesting(*(made[name] for name in order if name in made))
    assert found == ["count", "delay", "default" if engine else "slow"]


def test_declared_orders_hold() -> None:
    class Last(Wrapping):
        after = ("delay",)

    assert nesting(Last("count"), Wrapping("delay"), Resting()) == ["delay", "count", "slow"]


def test_one_that_stays_out_is_no_layer() -> None:
    assert nesting(Wrapping("count", leaves="slow"), Resting()) == ["slow"]
    assert nesting(Wrapping("count", leaves="slow"), Wrapping("a"), Resting()) == ["a", "slow"]


def test_one_that_cannot_go_around_says_so() -> None:
    with pytest.raises(PluginError, match="'count' cannot go around 'slow'") as caught:
        contributions(Wrapping("count", refuses="slow"), Resting())
    assert caught.value.__notes__ == [
        "raised by plugin 'count' (0) in polyshard_collectives_backend, wrapping 'slow' of "
        "plugin 'resting' (0) as collectives of group 'block'"
    ]


def test_what_a_wrapper_makes_has_to_fit() -> None:
    class Odd(Wrapping):
        def around(self, inner: CollectivesBackend) -> Any:
            return None

    expected = r"'odd' \(0\): polyshard_collectives_backend, wrapping 'slow' .* returned a None"
    with pytest.raises(PluginError, match=expected):
        contributions(Odd("odd"), Resting())


def test_two_claims_are_refused_around_or_not() -> None:
    class Rival(Resting):
        name = "rival"

    with pytest.raises(ConflictError, match=r"'resting' \(0\) and 'rival' \(0\) both claim"):
        contributions(Wrapping("count"), Resting(), Rival())


def test_parts_belong_to_their_plugins_and_all_may_speak() -> None:
    found = contributions(Wrapping("count"), Wrapping("delay"), Resting())
    outer, _, claimed = found.all(COLLECTIVES)
    assert found.plugin_of(outer) == "plugin 'count' (0)"
    assert found.plugin_of(claimed) == "plugin 'resting' (0)"
    assert found.notices == ("count around delay", "delay around slow")


# Codecs and storages ------------------------------------------------------------------------------


class Flipped(BoundGatherCodec):
    """Another codec's payload, every bit turned over."""

    def __init__(self, inner: BoundGatherCodec) -> None:
        self.inner, self.payload_bytes = inner, inner.payload_bytes

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        self.inner.encode(shard, payload)
        payload.bitwise_not_()

    def decode(self, payloads: Tensor, regions: Any) -> None:
        self.inner.decode(payloads.bitwise_not(), regions)


class FlippedCodec(GatherCodec):
    name = "flipped"

    def __init__(self, inner: GatherCodec) -> None:
        self.inner = inner

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundGatherCodec | None:
        bound = self.inner.bind(group, layout)
        return None if bound is None else Flipped(bound)


class Logging(StorageFactory):
    name, settings = "logging", "all"

    def __init__(self, inner: StorageFactory) -> None:
        self.inner = inner
        self.rested: list[int] = []

    def bind(self, group: GroupInfo, layout: GroupLayout) -> ShardStorage | None:
        self.rested.append(layout.shard_numel)
        return self.inner.bind(group, layout)


class AroundAll(Plugin):
    name = "around_all"

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> Around[GatherCodec]:
        return Around(FlippedCodec)

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> Around[StorageFactory]:
        return Around(Logging)


def trained(*plugins: object) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(5, 3), plugins=plugins)
    for step in range(2):
        model(torch.full((2, 5), 1.0 + step + dist.get_rank())).square().sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()], model  # type: ignore[union-attr]


@ranks(2)
def test_wrapped_parts_train_like_those_inside(rank: int, size: int) -> None:
    inside = [Codecs(), Resting()]
    expected, _ = trained(*inside)
    found, model = trained(AroundAll(), Wrapping("count", "often"), *inside)
    assert all(map(torch.equal, found, expected))
    (plan,) = describe(model).groups
    assert plan.roles.exclusive[GATHER_CODEC.name] == "flipped around bytes(fp32)"
    assert plan.roles.exclusive[STORAGE.name] == "logging(all) around away"
    assert plan.roles.exclusive[COLLECTIVES.name] == "count(often) around slow"
    assert "collectives count(often) around slow" in str(describe(model))
    assert "seen by count" in plan.transfers or "payload" in plan.transfers
    assert plan.payloads.gather == BytesGather(plan.layout).payload_bytes


@ranks(2)
def test_the_engines_own_parts_can_be_gone_around(rank: int, size: int) -> None:
    expected, plain = trained()
    found, model = trained(AroundAll(), Wrapping("count"))
    assert all(map(torch.equal, found, expected))
    (plan,), (bare,) = describe(model).groups, describe(plain).groups
    assert plan.roles.exclusive[GATHER_CODEC.name] == "flipped around native"
    assert plan.roles.exclusive[COLLECTIVES.name] == "count around default"
    assert plan.gather_bytes == bare.gather_bytes
    assert plan.ways == bare.ways  # nothing was bound, so nothing is packed


@ranks(2)
def test_ranks_compare_how_parts_nest(rank: int, size: int) -> None:
    inner = Wrapping("delay", leaves="slow" if rank else "")
    model = fully_shard(nn.Linear(4, 4), plugins=[inner, Wrapping("count"), Resting()])
    with pytest.raises(PlanMismatchError) as caught:
        model(torch.ones(1, 4))
    assert "collectives count around delay around slow" in str(caught.value)
    assert "collectives count around slow" in str(caught.value)


@ranks(2)
def test_every_order_of_passing_gives_one_plan(rank: int, size: int) -> None:
    plans = set()
    for order in itertools.permutations([Wrapping("count"), Wrapping("delay"), Resting()]):
        (plan,) = describe(fully_shard(nn.Linear(4, 4), plugins=order)).groups
        plans.add(plan.lines())
    assert len(plans) == 1
    assert "collectives count around delay around slow" in "\n".join(*plans)
