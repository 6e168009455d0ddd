"""The samples of a slot, and its random numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyshard_reproducible import ReproducibleError, SlotSampler
from polyshard_reproducible.randomness import kept_random_state, seed_of


@given(st.integers(1, 60), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.booleans())
def test_an_epoch_gives_no_sample_twice(
    samples: int, batch_size: int, slots: int, shuffle: bool
) -> None:
    if samples < batch_size * slots:
        with pytest.raises(ReproducibleError, match="do not fill one step"):
            SlotSampler(samples, batch_size, slots)
        return
    sampler = SlotSampler(samples, batch_size, slots, shuffle=shuffle)
    steps = range(sampler.steps_per_epoch)
    seen = [i for step in steps for slot in range(slots) for i in sampler.indices(step, slot)]
    assert len(seen) == len(set(seen)) == samples - samples % (batch_size * slots)
    assert set(seen) <= set(range(samples))


def test_order_goes_by_step_alone() -> None:
    one, other = (SlotSampler(40, 2, 4, seed=7) for _ in range(2))
    there = [one.indices(step, slot) for step in range(12) for slot in range(4)]
    back = [other.indices(s, slot) for s in reversed(range(12)) for slot in reversed(range(4))]
    assert there == back[::-1]
    assert there[:20] != there[20:40]  # another epoch
    assert there[0] != SlotSampler(40, 2, 4, seed=8).indices(0, 0)
    assert SlotSampler(40, 2, 4, shuffle=False).indices(6, 1) == [10, 11]


@pytest.mark.parametrize(("step", "slot"), [(0, 4), (0, -1), (-1, 0)])
def test_what_there_is_not_is_refused(step: int, slot: int) -> None:
    with pytest.raises(ReproducibleError, match="there is no slot"):
        SlotSampler(40, 2, 4).indices(step, slot)


def test_seeds_differ_and_stay() -> None:
    seeds = {seed_of(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125
    assert seed_of(1, 2, 3) == 2904650318439132554


def test_generators_are_put_back() -> None:
    before = torch.get_rng_state()
    with kept_random_state(torch.device("cpu")):
        torch.manual_seed(9)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
