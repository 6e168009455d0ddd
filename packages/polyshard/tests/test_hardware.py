"""Rings by hand, and a published module that says what is installed."""

from __future__ import annotations

import pytest

from polyshard import installed
from polyshard.hardware import Hardware, Protocol, Ring, ring_bandwidth, rings


def test_nodes_have_the_network_of_all_their_ranks() -> None:
    assert ring_bandwidth(8, 1, 450e9, 50e9) == 450e9
    assert ring_bandwidth(16, 2, 450e9, 50e9) == 8 * 50e9
    assert ring_bandwidth(4, 4, 450e9, 50e9) == 50e9
    assert ring_bandwidth(32, 2, 450e9, 50e9) == 450e9  # no more than a rank sends inside


def test_a_ring_goes_once_around_every_rank_and_node() -> None:
    (ring,) = rings(16, 2, 1e6, 1e9, [Protocol(10.0, 1.0, 5.0, 0.5)])
    assert ring == Ring(10.0, 14 * 1.0 + 5.0, 0.5)
    assert ring.seconds(100.0) == pytest.approx((10 + 19 + 200) / 1e6)
    assert ring.seconds(100.0, calls=3, ways=2) == pytest.approx((3 * (10 + 38) + 200) / 1e6)


def test_few_bytes_take_the_protocol_of_low_latency() -> None:
    simple, low_latency = Hardware().rings(range(64))
    assert low_latency.seconds(1e3) < simple.seconds(1e3)
    assert low_latency.seconds(1e9) > simple.seconds(1e9)


def test_what_is_published_is_there() -> None:
    for name in installed.__all__:
        assert getattr(installed, name) is not None
    assert installed.torch_release() >= installed.OLDEST_TORCH
