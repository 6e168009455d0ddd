"""A random rank is killed at random moments, and the run ends as if nothing had happened.

``python -m pytest packages/polyshard-demo/tests/test_kills.py --kills 50 --kill-seed 1 -s``
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from fault_jobs import Undisturbed, final_state, losses, training
from fault_kills import KILLS_PER_RUN, Record, disturbed

# torch says that it loads without ranks, which is meant.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

STEPS_PER_KILL = 30


@pytest.mark.timeout(1200)
def test_killed_ranks_change_nothing(
    pytestconfig: pytest.Config, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    kills, seed = pytestconfig.getoption("kills"), pytestconfig.getoption("kill_seed")
    source, record = random.Random(seed), Record()
    steps = STEPS_PER_KILL * min(kills, KILLS_PER_RUN)
    wanted = final_state(undisturbed(steps))
    while len(record.kills) < kills:
        run = tmp_path / f"after-{len(record.kills)}"
        left = min(KILLS_PER_RUN, kills - len(record.kills))
        record.add(disturbed(training(run, steps), run, source, left))
        found = final_state(run)
        assert found.keys() == wanted.keys()
        differing = [key for key in wanted if not torch.equal(found[key], wanted[key])]
        assert not differing, f"seed {seed}"
        assert losses(run) == losses(undisturbed(steps))
    print(f"\nseed {seed}: {record.summary()}")
    assert len(record.seconds) > 0
