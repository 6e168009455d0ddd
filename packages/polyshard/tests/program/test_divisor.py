"""What sums are divided by, where a codec makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from polyshard import Plugin, fully_shard
from polyshard.plugins.contract import hookimpl
from polyshard.plugins.seams import BoundReduceCodec, GroupInfo, ReduceCodec
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import ranks


class Twenties(BoundReduceCodec):
    """Every sum is 20."""

    payload_bytes = 4

    def __init__(self, divisor: float | None) -> None:
        self.divisor = divisor

    @override
    def encode(self, chunks: Any, payloads: Tensor) -> None:
        payloads.zero_()

    @override
    def decode_sum(self, payloads: Tensor, outs: Any) -> None:
        for out in outs:
            out.fill_(20.0)


class TwentiesCodec(ReduceCodec):
    name = "twenties"

    def __init__(self, divisor: float | None) -> None:
        self._divisor = divisor

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundReduceCodec:
        return Twenties(self._divisor)


class TwentiesPlugin(Plugin):
    name = "twenties"

    def __init__(self, divisor: float | None) -> None:
        self._divisor = divisor

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceCodec:
        """Of every group."""
        return TwentiesCodec(self._divisor)


@ranks(2)
@pytest.mark.parametrize(
    ("factor", "divisor", "expected"), [(None, None, 10.0), (None, 8.0, 2.5), (5.0, 8.0, 4.0)]
)
def test_the_user_says_then_the_codec_then_the_ranks(
    rank: int, size: int, factor: float | None, divisor: float | None, expected: float
) -> None:
    model: Any = fully_shard(nn.Linear(4, 4), plugins=[TwentiesPlugin(divisor)])
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model(torch.ones(1, 4)).sum().backward()
    grads = [p.grad.to_local() for p in model.parameters()]
    assert all(bool((g == expected).all()) for g in grads)
