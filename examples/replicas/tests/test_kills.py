"""Groups under torchft are killed: a few kills here, more by ``kills.py`` itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="torchft not installed")
sys.path.insert(0, str(Path(__file__).parents[1]))

from kills import Plan, measure


def test_killed_groups_come_back_and_change_no_bit(tmp_path: Path) -> None:
    found = measure(tmp_path, Plan(4, seed=1, is_warm=True))
    assert found.kills == 4
    assert found.same_losses
    assert found.same_weights
    assert found.steps_lost <= 1
    assert found.steps_alone > 0
    assert found.starts > 0
    assert found.seconds_to_first_step[0] <= 5
