"""The conformance kit, and what this plugin is for."""

import pytest
from torch import nn, ones

from polyshard import fully_shard, stats
from polyshard_testing import PluginConformance, ranks
from polyshard_byte_counter import ByteCounter


class TestConformance(PluginConformance):
    @pytest.fixture
    def factory(self):
        return ByteCounter


@ranks(2)
def test_it_adds_up_what_the_engine_does(rank: int, size: int) -> None:
    plugin = ByteCounter()
    model = nn.Linear(64, 64)
    fully_shard(model, plugins=[plugin])
    model(ones(1, 64)).sum().backward()
    assert plugin.sent_bytes["(root)"] == stats(model).bytes_sent > 0
