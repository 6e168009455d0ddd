"""Methods of a sharded module that say how it communicates; torch's engine takes the same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from toy_codecs import BytesReduce, Codecs
from toy_comms import CountingGather, CountingReduce
from toy_landing import Landing
from toy_models import assert_same_parameters, build, full, loss_of, shard, tokens_for, train

import polyshard
from polyshard import Plugin, fully_shard, hookimpl
from polyshard.errors import CustomCommsError, IneffectiveSettingWarning, LifecycleError
from polyshard.module.schedule import own_unit
from polyshard.plugins.seams import BoundReduceCodec, GroupInfo, ReduceCodec
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import ranks


@ranks(2)
def test_setters_without_effect_say_so(rank: int, size: int) -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    with pytest.warns(IneffectiveSettingWarning, match="set_symm_mem_for_comm"):
        model.set_symm_mem_for_comm()
    with pytest.warns(IneffectiveSettingWarning, match="no communication buffers"):
        model.set_allocate_memory_from_process_group_for_comm(enable=True)
    model.set_allocate_memory_from_process_group_for_comm(enable=False)
    model.set_force_sum_reduction_for_comms(enable=True)
    model._set_unshard_async_op(async_op=True)
    model(torch.ones(1, 4)).sum().backward()


@ranks(2, 3)
def test_custom_collectives_move_the_bytes(rank: int, size: int) -> None:
    plain, model = (shard(build(), fully_shard) for _ in range(2))
    gather, reduce = CountingGather(), CountingReduce()
    block: Any = model.blocks[0]
    block.set_custom_all_gather(gather)
    block.set_custom_reduce_scatter(reduce)
    batches = [tokens_for(step, rank) for step in range(3)]
    expected = train(plain, batches).losses
    torch.testing.assert_close(train(model, batches).losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_parameters(model, plain, exact=size == 2)
    assert (gather.calls, reduce.calls) == (6, 3)
    assert (gather.allocated, reduce.allocated) == (12, 6)
    assert "gloo-p2p with CountingGather, CountingReduce" in str(polyshard.describe(model))


class OfLarge(Plugin, ReduceCodec):
    """Encodes the gradients of groups with more than 16 elements."""

    name = "of large"
    settings = ""

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceCodec:
        return self

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundReduceCodec | None:
        large = sum(p.chunk_numel for p in layout.parameters) * layout.world_size > 16
        return BytesReduce(layout) if large else None


@ranks(2)
def test_a_custom_reduce_scatter_that_gradients_do_not_go_through(rank: int, size: int) -> None:
    for plugin, reason in ((Codecs(), "'codecs'.* encodes"), (Landing(), "'landing'.* sends")):
        model: Any = fully_shard(nn.Linear(4, 4), plugins=[plugin])
        reduce = CountingReduce()
        model.set_custom_reduce_scatter(reduce)
        with pytest.raises(CustomCommsError, match=rf"no effect.*'weight', 'bias'.*{reason}"):
            polyshard.describe(model)
        with pytest.raises(CustomCommsError, match="has no effect"):
            model(torch.ones(1, 4))
        model.set_custom_reduce_scatter(None)
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        assert model.weight.grad is not None
        assert reduce.calls == 0

    small: Any = fully_shard(nn.Linear(1, 4), plugins=[OfLarge()])  # which it leaves alone
    reduce = CountingReduce()
    small.set_custom_reduce_scatter(reduce)
    small(torch.ones(1, 1)).sum().backward()
    assert reduce.calls == 1


@ranks(2)
def test_all_reduce_hooks(rank: int, size: int) -> None:
    """The hook sees the mean, per group, and what it writes is the gradient."""
    plain, model = (shard(build(), fully_shard) for _ in range(2))
    head: Any = model
    seen: list[int] = []

    def halve(gradient: Tensor) -> None:
        seen.append(gradient.numel())
        gradient.mul_(0.5)

    head.set_all_reduce_hook(halve)
    for each in (plain, model):
        loss_of(each, tokens_for(0, rank)).backward()
    assert len(seen) == 1, "of the root's own group only"
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        factor = 1.0 if name.startswith("blocks") else 0.5
        assert torch.equal(full(ours.grad), full(theirs.grad) * factor), name


@ranks(4)
def test_all_reduce_hooks_come_after_replicas(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    model: Any = shard(build(), fully_shard, mesh=mesh)
    seen: list[Tensor] = []
    model.set_all_reduce_hook(lambda gradient: seen.append(gradient.clone()))
    loss_of(model, tokens_for(0, rank)).backward()
    everyone = [torch.empty_like(seen[0]) for _ in range(2)]
    dist.all_gather(everyone, seen[0], group=mesh.get_group("replicate"))
    assert torch.equal(everyone[0], everyone[1]), "called before replicas were reduced"


@ranks(2)
def test_other_communication_setters_change_no_bit(rank: int, size: int) -> None:
    plain, model = (shard(build(), fully_shard) for _ in range(2))
    root: Any = model
    root.set_separate_reduce_scatter_group()
    root.set_post_optim_event(torch.Event())
    root.set_reduce_scatter_max_input_buffers(3)
    batches = [tokens_for(step, rank) for step in range(2)]
    assert train(model, batches).losses == train(plain, batches).losses
    block: Any = model.blocks[0]
    with pytest.raises(LifecycleError, match=r"'blocks\.0', which is not the root"):
        block.set_post_optim_event(torch.Event())


@ranks(2)
def test_the_largest_number_of_reductions_that_a_unit_asks_for_is_the_roots(
    rank: int, size: int
) -> None:
    model: Any = shard(build(), fully_shard)
    for number, block in enumerate(model.blocks):
        block.set_reduce_scatter_max_input_buffers(3 - number)
    model(tokens_for(0, rank))
    assert own_unit(model).context.reductions.most == 3
