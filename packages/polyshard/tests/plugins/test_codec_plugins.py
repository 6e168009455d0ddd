"""Codecs in one class: what an author writes, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from samples import short
from torch import Tensor, nn
from toy_groups import GROUP, contributions

import polyshard
from polyshard import CodecGroup, GatherCodecPlugin, ReduceCodecPlugin, describe, fully_shard
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins.seams import GroupInfo
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import ranks
from polyshard_testing.cases import case


@dataclass(frozen=True, eq=False)
class Bf16Gather(GatherCodecPlugin):
    """The commonest plugin, as an author writes it."""

    name = "bf16_gather"
    version = "1.2"
    dtype: torch.dtype = torch.bfloat16

    def payload_bytes(self, group: GroupInfo, layout: GroupLayout) -> int:
        return self.dtype.itemsize * layout.shard_numel

    def encode(self, shard: Tensor, payload: Tensor, at: CodecGroup) -> None:
        payload.view(self.dtype).copy_(shard)

    def decode(self, payloads: Tensor, regions: Any, at: CodecGroup) -> None:
        values = payloads.view(self.dtype)
        for placed, region in zip(at.layout.parameters, regions, strict=True):
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
            return group.name != "block"

    assert contributions(Own(), Bf16Gather()).gather_codec.name == "bf16_gather"
    with pytest.raises(ConflictError, match="both claim the gather codec"):
        contributions(short.Exact(), Bf16Gather())


@ranks(2)
def test_each_group_has_state_of_its_own_for_as_long_as_it_lives(rank: int, size: int) -> None:
    class Recording(short.Feedback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int]] = []

        def encode(self, chunks: Any, payloads: Tensor, at: CodecGroup) -> None:
            super().encode(chunks, payloads, at)
            self.seen.append((at.group.name, at.state.numel()))

    plugin = Recording()
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(model[0], plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    describe(model)

    def step() -> None:
        model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()

    step()
    served: Any = plugin._served
    states = {one.at.group.name: one.at.state for one in served.values()}
    assert sorted(states) == ["(root)", "0"]
    assert all(bool(state.abs().sum() > 0) for state in states.values())
    model[0].weight.requires_grad_(False)  # has the codec bound anew
    model.zero_grad()
    step()
    assert {s.at.state.shape for s in served.values()} == {s.shape for s in states.values()}
    assert [name for name, _ in plugin.seen] == ["(root)", "0"] * 2
    kept = next(s.at for s in served.values() if s.at.group.name == "0")
    assert not kept.group.parameters[0].requires_grad
    # What the first step left out was added in the second one: the state was not made anew.
    assert not torch.equal(kept.state, states["0"])


def test_state_is_made_anew_only_for_other_sizes() -> None:
    made = []

    class Counting(short.Exact):
        def new_state(self, group: GroupInfo, layout: GroupLayout) -> object:
            made.append(group.name)
            return object()

    at = case(2, 0)
    codec: Any = contributions(Counting()).gather_codec
    states = []
    for info in (at.info, replace(at.info, name="renamed"), replace(at.info, rank=0)):
        codec.bind(info, at.layout)
        states.append(codec.at.state)
    assert len(set(states)) == 1
    codec.bind(replace(at.info, param_dtype=torch.bfloat16), at.layout)
    assert codec.at.state not in states
    assert made == ["layer", "layer"]


def test_a_class_is_one_codec() -> None:
    with pytest.raises(PluginError, match="Both is a GatherCodecPlugin and a ReduceCodecPlugin"):

        class Both(GatherCodecPlugin, ReduceCodecPlugin):  # type: ignore[misc]
            pass


def test_what_is_forgotten_is_said_by_python() -> None:
    class Half(GatherCodecPlugin):
        name = "half"

        def payload_bytes(self, group: GroupInfo, layout: GroupLayout) -> int:
            return 0

    with pytest.raises(TypeError, match=r"decode.*encode"):
        Half()  # type: ignore[abstract]


@ranks(1)
def test_an_answer_instead_of_a_payload_is_refused(rank: int, size: int) -> None:
    class Answering(Bf16Gather):
        def encode(self, shard: Tensor, payload: Tensor, at: CodecGroup) -> Any:
            return shard.bfloat16()

    model = fully_shard(nn.Linear(2, 2), plugins=[Answering()])
    with pytest.raises(PluginError, match=r"Answering\.encode returned a Tensor, .* be dropped"):
        model(torch.ones(1, 2))


@ranks(1)
def test_sizes_are_checked_where_codecs_are_bound(rank: int, size: int) -> None:
    class Fractional(Bf16Gather):
        def payload_bytes(self, group: GroupInfo, layout: GroupLayout) -> Any:
            return 1.5

    with pytest.raises(PluginError, match=r"'bf16_gather' \(1\.2\): .*payload_bytes .* is 1\.5"):
        describe(fully_shard(nn.Linear(2, 2), plugins=[Fractional()]))


def test_the_codec_is_the_plugins_of_one_group() -> None:
    plugin = Bf16Gather()
    first, second = (plugin.polyshard_gather_codec(GROUP) for _ in range(2))
    assert first is not second
    assert isinstance(first, polyshard.GatherCodec)
