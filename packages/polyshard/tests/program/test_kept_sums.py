"""Codecs whose sums the transport makes, and that keep sums of several backwards together."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from toy_models import reset_together
from typing_extensions import override

from polyshard import MixedPrecisionPolicy, Plugin, describe, fully_shard
from polyshard.plugins.contract import hookimpl
from polyshard.plugins.seams import BoundReduceCodec, GroupInfo, ReduceCodec
from polyshard.sharding.layout import GroupLayout
from polyshard.transport.gloo import GlooReduce
from polyshard_testing import ranks


class Pairs(BoundReduceCodec):
    """Plain sums over ranks; those of every two backwards are given as one."""

    sums_in_tree = True
    divisor = 4.0

    def __init__(self, layout: GroupLayout) -> None:
        self.numels = [p.chunk_numel for p in layout.parameters]
        self.payload_bytes = 4 * sum(self.numels)
        self.coded = 0
        self.present: list[frozenset[int]] = []
        self._first: Tensor | None = None

    @override
    def begin(self, present: frozenset[int]) -> None:
        self.present.append(present)

    @override
    def encode(self, chunks: Any, payloads: Tensor) -> None:
        self.coded += 1
        payloads.view(torch.float32).copy_(torch.cat(list(chunks), dim=1))

    @override
    def decode_sum(self, payloads: Tensor, outs: Any) -> None:
        summed = payloads.view(torch.float32).sum(0)
        for out, part in zip(outs, summed.split(self.numels), strict=True):
            out.copy_(part)

    @override
    def keep(self, total: Tensor) -> Tensor | None:
        if self._first is None:
            self._first = total
            return None
        first, self._first = self._first, None
        return first.add_(total)


class PairsPlugin(Plugin, ReduceCodec):
    name = "pairs"
    bound: Pairs

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> Pairs:
        self.bound = Pairs(layout)
        return self.bound

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceCodec:
        """Of every group."""
        return self


def check(model: Any, rank: int, size: int) -> None:
    """Gradients of two backwards arrive with the second, and again in a second step."""
    for _ in range(2):
        for factor in (1.0, 10.0):
            assert all(p.grad is None for p in model.parameters())
            (model(torch.ones(1, 3)).sum() * factor * (rank + 1)).backward()
        expected = 11.0 * size * (size + 1) / 2 / 4.0
        for parameter in model.parameters():
            assert bool((parameter.grad.full_tensor() == expected).all())
        model.zero_grad()


@ranks(1, 2, 4)
def test_sums_of_the_transport(rank: int, size: int) -> None:
    model = fully_shard(nn.Linear(3, 5), plugins=[plugin := PairsPlugin()])
    check(model, rank, size)
    assert plugin.bound.coded == 0
    assert plugin.bound.present == [frozenset({0, 1})] * 4
    codec = describe(model).groups[0].payloads
    assert codec.reduce is None, "gradients travel as they are"


@ranks(2, 4)
def test_a_transport_without_such_sums(rank: int, size: int) -> None:
    with patch.object(GlooReduce, "in_tree", lambda route: None):
        model = fully_shard(nn.Linear(3, 5), plugins=[plugin := PairsPlugin()])
        check(model, rank, size)
        assert plugin.bound.coded == 4
        assert describe(model).groups[0].payloads.reduce == plugin.bound.payload_bytes


@ranks(4)
def test_replicas_see_whole_sums(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    model: Any = fully_shard(nn.Linear(3, 5), mesh=mesh, plugins=[PairsPlugin()])
    check(model, rank, size)


@ranks(2)
def test_the_wire_dtype_is_that_of_gradients(rank: int, size: int) -> None:
    """bf16 gradients, summed in fp32: half the bytes that the codec would send."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = fully_shard(nn.Linear(4, 8, bias=False), mp_policy=policy, plugins=[PairsPlugin()])
    group = describe(model).groups[0]
    assert group.reduce_bytes == 4 * 8 // 2 * torch.bfloat16.itemsize
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    found = [p.grad.full_tensor() for p in model.parameters()]
    assert all(g.dtype is torch.float32 and bool((g == 1.0).all()) for g in found)


@ranks(2)
def test_a_step_that_is_left_between(rank: int, size: int) -> None:
    """What was kept is the codec's to forget; ``.grad`` has none of it."""
    model: Any = fully_shard(nn.Linear(3, 5), plugins=[plugin := PairsPlugin()])
    model(torch.ones(1, 3)).sum().backward()
    reset_together(model)
    plugin.bound._first = None
    check(model, rank, size)
