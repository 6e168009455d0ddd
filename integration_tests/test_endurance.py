"""Failures at random, and what is left of them; longer ones are ``python -m faults``."""

from __future__ import annotations

import pytest
from faults import raises, soak

from fault_table import BAR_SECONDS


def test_all_ranks_raise_when_one_does() -> None:
    found = raises.measure(ranks=2, count=10, seed=0)
    assert max(max(each.seconds) for each in found) < BAR_SECONDS


@pytest.mark.slow
@pytest.mark.thorough
def test_nothing_grows_with_steps_saves_and_failures() -> None:
    length = soak.Length(steps=400, save_every=25, fail_every=4, sample_every=10)
    for each in soak.measure(2, length):
        grown = soak.growth(each)
        assert grown["descriptors"] <= 0
        assert grown["threads"] <= 0
        assert grown["store_keys"] <= 0
        assert grown["resident_kib"] < 8 << 10
