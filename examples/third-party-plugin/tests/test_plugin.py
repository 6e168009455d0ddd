"""The conformance kit, and what this plugin is for."""

import pytest
from torch import nn, ones

from polyshard import fully_shard, stats
from polyshard.testing import PluginConformance, World
from polyshard_byte_counter import ByteCounter


class TestConformance(PluginConformance):
    @pytest.fixture
    def factory(self):
        return ByteCounter


def count(rank: int, size: int) -> None:
    plugin = ByteCounter()
    model = nn.Linear(64, 64)
    fully_shard(model, plugins=[plugin])
    model(ones(1, 64)).sum().backward()
    assert plugin.observer.sent_bytes["(root)"] == stats(model).bytes_sent > 0


def test_it_counts_what_the_engine_counts(world2: World) -> None:
    world2.run(count)
