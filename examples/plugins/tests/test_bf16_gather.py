"""Half the bytes, weights rounded to bfloat16, and nothing where two bytes travel anyway."""

from collections.abc import Callable

import pytest
import torch
from gallery_training import whole as full
from torch import nn

from polyshard import FSDPModule, MixedPrecisionPolicy, describe, fully_shard, stats
from polyshard_gallery.bf16_gather import Bf16Gather
from polyshard_testing import PluginConformance, ranks


class TestConformance(PluginConformance):
    tolerance = 2.0**-8  # half of the distance of two bfloat16 numbers

    @pytest.fixture
    def factory(self) -> Callable[[], object]:
        return Bf16Gather


@ranks(2, 3)
def test_weights_are_rounded_and_bytes_halved(rank: int, size: int) -> None:
    model = nn.Linear(64, 48, bias=False)
    whole = model.weight.detach().clone()
    fully_shard(model, plugins=[Bf16Gather()])
    assert isinstance(model, FSDPModule)
    model.unshard()
    torch.testing.assert_close(model.weight, whole.bfloat16().float(), rtol=0, atol=0)
    assert stats(model).bytes_sent == (size - 1) * 64 * 48 // size * 2
    model.reshard()
    torch.testing.assert_close(full(model.weight), whole, rtol=0, atol=0)


@ranks(2)
def test_what_travels_in_two_bytes_is_left_alone(rank: int, size: int) -> None:
    model = nn.Linear(64, 48)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=policy, plugins=[Bf16Gather()])
    native = nn.Linear(64, 48)
    fully_shard(native, mp_policy=policy)
    assert describe(model).step_bytes == describe(native).step_bytes
