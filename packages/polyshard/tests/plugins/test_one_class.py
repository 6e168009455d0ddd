"""Plugins in one class: what an author writes, and what becomes of it."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from samples import short
from torch import Tensor, nn
from toy_groups import GROUP, contributions

import polyshard
from polyshard import (
    BackendPlugin,
    GatherCodecPlugin,
    ObserverPlugin,
    ReduceCodecPlugin,
    StoragePlugin,
    describe,
    fully_shard,
    stats,
)
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins.contributions import GATHER_CODEC
from polyshard.plugins.seams import GroupIdentity, GroupInfo
from polyshard.transport import Pending
from polyshard_testing import ranks
from polyshard_testing.cases import case


@dataclass(frozen=True, eq=False)
class Bf16Gather(GatherCodecPlugin):
    """The commonest plugin, as an author writes it."""

    name = "bf16_gather"
    version = "1.2"
    dtype: torch.dtype = torch.bfloat16

    def payload_size(self) -> int:
        return self.dtype.itemsize * self.layout.shard_numel

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        payload.view(self.dtype).copy_(shard)

    def decode(self, payloads: Tensor, regions: Any) -> None:
        values = payloads.view(self.dtype)
        for placed, region in zip(self.layout.parameters, regions, strict=True):
            region.copy_(values.narrow(1, placed.shard_offset, placed.chunk_numel))


@ranks(2)
def test_one_class_decides_what_travels(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(6, 5)
    whole = [p.detach().clone() for p in model.parameters()]
    fully_shard(model, plugins=[Bf16Gather()])
    model.unshard()
    for found, expected in zip(model.parameters(), whole, strict=True):
        assert torch.equal(found, expected.bfloat16().float())
    model.reshard()
    (plan,) = describe(model).groups
    assert plan.gather_bytes == 2 * plan.layout.shard_numel


@ranks(1)
def test_name_version_and_settings_are_said_once(rank: int, size: int) -> None:
    model = fully_shard(nn.Linear(4, 4), plugins=[Bf16Gather(torch.float16)])
    (plan,) = describe(model).groups
    assert plan.roles.gather_codec == "bf16_gather(dtype=torch.float16)"
    assert plan.roles.plugins == ("bf16_gather 1.2 (dtype=torch.float16)",)


def test_groups_that_are_not_served_stay_free() -> None:
    class Own(Bf16Gather):
        name = "own"

        def serves(self, group: GroupInfo) -> bool:
            return len(group.parameters) != 1

    assert contributions(Own(), Bf16Gather())[GATHER_CODEC].name == "bf16_gather"
    with pytest.raises(ConflictError, match="both claim the gather codec"):
        contributions(short.Exact(), Bf16Gather())


@ranks(2)
def test_each_group_has_state_of_its_own_for_as_long_as_it_lives(rank: int, size: int) -> None:
    seen: dict[str, list[Recording]] = {}

    class Recording(short.Feedback):
        def encode(self, chunks: Any, payloads: Tensor) -> None:
            super().encode(chunks, payloads)
            seen.setdefault(self.group.name, []).append(self)

    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    plugin = Recording()
    fully_shard(model[0], plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    describe(model)

    def step() -> None:
        model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()

    step()
    assert sorted(seen) == ["(root)", "0"]
    first = {name: copies[0].left.clone() for name, copies in seen.items()}
    assert all(bool(left.abs().sum() > 0) for left in first.values())
    model[0].weight.requires_grad_(False)  # has the codec bound anew
    model.zero_grad()
    step()
    assert all(one is other for one, other in seen.values())
    assert not seen["0"][0].group.parameters[0].requires_grad
    # What the first step left out was added in the second one: the state was not made anew.
    assert not torch.equal(seen["0"][0].left, first["0"])
    assert not hasattr(plugin, "left"), "the plugin itself serves no group"


def test_state_is_made_anew_only_for_other_sizes() -> None:
    made = []

    class Counting(short.Exact):
        def setup(self) -> None:
            made.append(str(self.group.identity))

    at = case(2, 0)
    codec: Any = contributions(Counting())[GATHER_CODEC]
    for info in (at.info, replace(at.info, rank=0)):
        assert codec.bind(info, at.layout) is codec
    assert made == ["layer"]
    codec.bind(replace(at.info, param_dtype=torch.bfloat16), at.layout)
    assert made == ["layer", "layer"]


def test_settings_stay_frozen_while_a_copy_keeps_what_is_its_own() -> None:
    made: Any = Bf16Gather().polyshard_gather_codec(GROUP)
    made.scratch = 3
    with pytest.raises(FrozenInstanceError):
        made.dtype = torch.float16
    with pytest.raises(FrozenInstanceError):
        Bf16Gather().scratch = 3  # type: ignore[attr-defined]


def test_a_group_goes_though_its_plugin_stays() -> None:
    plugin = Bf16Gather()
    identity = GroupIdentity("gone")
    made: Any = plugin.polyshard_gather_codec(replace(GROUP, identity=identity))
    watched = weakref.ref(identity)
    del made, identity
    gc.collect()
    assert watched() is None


@ranks(2)
def test_a_storage_in_one_class_serves_the_groups_it_likes(rank: int, size: int) -> None:
    @dataclass(frozen=True, eq=False)
    class Counted(StoragePlugin):
        name = "counted"
        least: int = 20
        seen: list[str] = field(default_factory=list, repr=False)

        def serves(self, group: GroupInfo) -> bool:
            return sum(math.prod(p.shape) for p in group.parameters) > self.least

        def setup(self) -> None:
            self.near = torch.zeros(self.layout.shard_numel)

        def rest(self, shard: Tensor) -> Tensor:
            self.resting = shard
            return shard

        def view(self) -> Tensor:
            return self.near

        def changed(self) -> None:
            self.seen.append("changed")

        def fetch(self) -> None:
            self.near.copy_(self.resting)
            self.seen.append(self.group.name)

    plugin = Counted()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    expected = model(torch.ones(1, 4)).detach()
    fully_shard(model[0], plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    assert torch.equal(model(torch.ones(1, 4)).detach(), expected)
    model(torch.ones(1, 4)).sum().backward()
    assert plugin.seen == ["changed", "0", "changed", "0", "0"]
    text = str(describe(model))
    assert "shard storage counted(least=20)" in text


@ranks(2)
def test_numbers_of_a_codec_are_in_stats(rank: int, size: int) -> None:
    class Rounding(Bf16Gather):
        def setup(self) -> None:
            self.worst = torch.zeros(())

        def encode(self, shard: Tensor, payload: Tensor) -> None:
            super().encode(shard, payload)
            self.worst = (payload.view(self.dtype) - shard).abs().max()

        def numbers(self) -> dict[str, float]:
            return {"largest error": float(self.worst)}

    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.fill_(1.0 + 2.0**-9)  # halfway to the next bfloat16 below 1 + 2**-7
        model[0].bias.zero_()
    fully_shard(model[0], plugins=[Rounding()])
    fully_shard(model)
    assert stats(model).numbers == {}
    model(torch.ones(1, 4))
    assert stats(model).numbers == {"0": {"bf16_gather largest error": 2.0**-9}}
    assert "0: bf16_gather largest error 0.001953" in str(stats(model))


@ranks(2)
def test_a_backend_in_one_class_knows_its_group(rank: int, size: int) -> None:
    sent: dict[str, int] = {}

    class Metered(BackendPlugin):
        name = "metered"

        def started(self, pending: Pending, sent_bytes: int) -> Pending:
            sent[self.group.name] = sent.get(self.group.name, 0) + sent_bytes
            return pending

    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    plugin = Metered()
    fully_shard(model[0], plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    model(torch.ones(1, 4)).sum().backward()
    plans = {plan.name: plan for plan in describe(model).groups}
    for name, found in stats(model).groups.items():
        assert sent[name] == found.sent_bytes
        assert plans[name].roles.transport.startswith("metered ")


@ranks(2)
def test_an_observer_in_one_class_watches_some_groups(rank: int, size: int) -> None:
    class Reduced(ObserverPlugin):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def serves(self, group: GroupInfo) -> bool:
            return group.parameters[0].shape == (8, 4)

        def on_reduced(self, group: str, wait_seconds: float) -> None:
            self.seen.append(group)

    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    plugin = Reduced()
    fully_shard(model[0], plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    model(torch.ones(1, 4)).sum().backward()
    assert plugin.seen == ["0"]


@ranks(2)
def test_a_group_has_no_name_while_hooks_run_and_a_unique_one_later(rank: int, size: int) -> None:
    """Two Linears sharded before their root are no longer both called "Linear"."""

    class ByName(Bf16Gather):
        def serves(self, group: GroupInfo) -> bool:
            return group.name == "0"

    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    with pytest.raises(PluginError, match=r"group of weight, bias in a 'Linear' has no name yet"):
        fully_shard(model[0], plugins=[ByName()])
    found: list[GroupInfo] = []

    class Keeping(Bf16Gather):
        def serves(self, group: GroupInfo) -> bool:
            found.append(group)
            return True

    plugin = Keeping()
    for unit in (*model, model):
        fully_shard(unit, plugins=[plugin])
    assert len({group.identity for group in found}) == len(found)
    shown = [plan.name for plan in describe(model).groups]
    assert sorted(shown) == sorted(str(group.identity) for group in found)
    assert sorted(shown) == sorted(group.name for group in found)


def test_a_class_is_one_codec() -> None:
    with pytest.raises(PluginError, match="Both is a GatherCodecPlugin and a ReduceCodecPlugin"):

        class Both(GatherCodecPlugin, ReduceCodecPlugin):  # type: ignore[misc]
            pass


def test_what_is_forgotten_is_said_by_python() -> None:
    class Half(GatherCodecPlugin):
        name = "half"

        def payload_size(self) -> int:
            return 0

    with pytest.raises(TypeError, match=r"decode.*encode"):
        Half()  # type: ignore[abstract]


@ranks(1)
def test_an_answer_instead_of_a_payload_is_refused(rank: int, size: int) -> None:
    class Answering(Bf16Gather):
        def encode(self, shard: Tensor, payload: Tensor) -> Any:
            return shard.bfloat16()

    model = fully_shard(nn.Linear(2, 2), plugins=[Answering()])
    with pytest.raises(PluginError, match=r"Answering\.encode returned a Tensor, .* be dropped"):
        model(torch.ones(1, 2))


@ranks(1)
def test_sizes_are_checked_where_codecs_are_bound(rank: int, size: int) -> None:
    class Fractional(Bf16Gather):
        def payload_size(self) -> Any:
            return 1.5

    with pytest.raises(PluginError, match=r"'bf16_gather' \(1\.2\): .*payload_bytes .* is 1\.5"):
        describe(fully_shard(nn.Linear(2, 2), plugins=[Fractional()]))


def test_the_codec_is_the_plugins_of_one_group() -> None:
    plugin = Bf16Gather()
    first, second = (plugin.polyshard_gather_codec(GROUP) for _ in range(2))
    assert first is not second
    assert isinstance(first, polyshard.GatherCodec)
