"""What codecs may ask of the engine: kept payloads, a second hop, current names; and notices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toy_codecs import Codecs, Keeping, Names, TwoHopReduction
from toy_models import build, full, shard, tokens_for, train

from polyshard import Plugin, describe, fully_shard, hookimpl
from polyshard.plugins.builtin import DeviceStorage, DeviceStorageFactory
from polyshard.plugins.seams import GroupInfo, Observer
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import ranks


@ranks(1)
def test_a_codec_in_a_world_of_one_has_memory_of_its_own(rank: int, size: int) -> None:
    """A codec at world size one must not write what it decoded over the shard."""
    plain, plugged = shard(build(), fully_shard), build()
    shard(plugged, fully_shard, plugins=[Codecs()])
    batches = [tokens_for(step, rank) for step in range(2)]
    assert train(plugged, batches).losses == train(plain, batches).losses
    unsharded: Any = plugged.blocks[0]
    sharded = unsharded.up.weight.to_local().data_ptr()
    unsharded.unshard()
    assert unsharded.up.weight.data_ptr() != sharded


@ranks(2)
def test_kept_payloads_follow_every_write(rank: int, size: int) -> None:
    plugin = Keeping()
    model: Any = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model[0], plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    model(torch.ones(1, 8)).sum().backward()
    (codec,) = [bound for bound in plugin.factory.bound if bound.encoded]
    assert codec.encoded == 1  # forward and backward gathered
    model(torch.ones(1, 8)).sum().backward()
    assert codec.encoded == 1  # a second micro-batch
    torch.optim.SGD(model.parameters(), 0.1).step()
    model(torch.ones(1, 8)).sum().backward()
    assert codec.encoded == 2
    model[0].weight.data.mul_(2.0)  # no version counter sees this
    found = model(torch.ones(1, 8)).sum()
    assert codec.encoded == 3
    whole = model[0].weight.full_tensor(), model[0].bias.full_tensor()
    torch.testing.assert_close(found, nn.functional.linear(torch.ones(1, 8), *whole).sum())


@ranks(4)
def test_a_codec_may_own_the_second_hop(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    gradients = []
    for plugins in ([], [TwoHopReduction()]):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        fully_shard(model, mesh=mesh, plugins=plugins)
        model(torch.full((1, 6), float(rank + 1))).sum().backward()
        assert model.weight.grad is not None
        gradients.append(full(model.weight.grad))
    assert torch.equal(gradients[1], 2 * gradients[0])


@ranks(1)
def test_reduce_codecs_learn_what_is_frozen(rank: int, size: int) -> None:
    plugin = TwoHopReduction()
    model = nn.Linear(4, 4)
    fully_shard(model, plugins=[plugin])
    model(torch.ones(1, 4)).sum().backward()
    model.weight.requires_grad_(False)
    model(torch.ones(1, 4)).sum().backward()
    assert plugin.factory.trainable[-1] == 1
    model.weight.requires_grad_(True)
    describe(model)
    assert plugin.factory.trainable[-1] == 2


@ranks(1)
def test_a_preview_binds_codecs_with_the_names_of_the_root(rank: int, size: int) -> None:
    plugin, kept = Names(), Keeping()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], plugins=[plugin])
    fully_shard(model, plugins=[kept])
    preview = str(describe(model))
    assert plugin.seen[-1] == ("0.weight", "0.bias")
    assert "kept: nothing to say" in preview
    assert preview == str(describe(model))
    model(torch.ones(1, 4))
    assert plugin.seen[-1] == ("0.weight", "0.bias")


class Place(DeviceStorageFactory, Observer):
    """A storage and an observer that have something to say."""

    nbytes = 0

    def bind(self, group: GroupInfo, layout: GroupLayout) -> DeviceStorage:
        self.nbytes = layout.shard_numel * group.orig_dtype.itemsize
        return super().bind(group, layout)

    @property
    def notices(self) -> tuple[str, ...]:
        return (f"{self.nbytes} bytes on the moon",)


class Telling(Plugin):
    name = "telling"

    def __init__(self) -> None:
        self.place = Place()

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> Place:
        return self.place

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> Place:
        return self.place


@ranks(2)
def test_storages_and_observers_may_add_notices(rank: int, size: int) -> None:
    model = nn.Linear(6, 4, bias=False)
    fully_shard(model, plugins=[Telling()])
    description = describe(model)
    (group,) = description.groups
    assert group.notices == (f"{group.shard_bytes} bytes on the moon",)  # by both, said once
    assert str(description).count("on the moon") == 1
