"""Steps take at least the time that the link says, and give the same numbers."""

import time
from collections.abc import Callable

import pytest
from torch import nn, ones

from polyshard import describe, fully_shard, stats
from polyshard_gallery.throttled_link import ThrottledLink
from polyshard_testing import PluginConformance, ranks


class TestConformance(PluginConformance):
    @pytest.fixture
    def factory(self) -> Callable[[], object]:
        return ThrottledLink


@ranks(2)
def test_transfers_take_the_time_of_the_link(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    plugins = [ThrottledLink(bytes_per_second=1e6, latency_seconds=0.01)]
    for layer in model:
        fully_shard(layer, plugins=plugins)
    fully_shard(model, plugins=plugins)
    assert "throttled_link gloo-p2p" in str(describe(model))
    begin = time.perf_counter()
    model(ones(1, 128)).sum().backward()
    took = time.perf_counter() - begin
    expected = stats(model).bytes_sent / 1e6 + 0.01
    assert expected > 0.1
    assert took >= expected


@ranks(2)
def test_a_fast_link_costs_next_to_nothing(rank: int, size: int) -> None:
    model = nn.Linear(8, 8)
    fully_shard(model, plugins=[ThrottledLink(bytes_per_second=1e12, latency_seconds=0.0)])
    model(ones(1, 8)).sum().backward()
    begin = time.perf_counter()
    model(ones(1, 8)).sum().backward()
    assert time.perf_counter() - begin < 5.0
