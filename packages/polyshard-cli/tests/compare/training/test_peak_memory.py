"""The peak is that of steps, above what was held before."""

from __future__ import annotations

import pytest
import torch
from compare_memory import peak_after

from polyshard_cli.compare.training.memory import CLEAR
from polyshard_testing.world import World

MIB = 1 << 20


@pytest.mark.skipif(not CLEAR.exists(), reason="this system cannot forget a peak")
def test_the_peak_of_building_is_forgotten(world1: World) -> None:
    (memory,) = world1.run(peak_after, 300 * MIB, 80 * MIB)
    assert not memory.with_build
    # The kernel's books may be late by some dozens of pages for each thread.
    assert 79 * MIB <= memory.peak_bytes < 100 * MIB


def test_nothing_is_held_without_a_model(world1: World) -> None:
    (memory,) = world1.run(peak_after, 0, 0)
    assert memory.peak_bytes < 20 * MIB
    assert memory.start_bytes > 20 * MIB  # torch itself
    assert torch.tensor(memory.peak_bytes) >= 0
