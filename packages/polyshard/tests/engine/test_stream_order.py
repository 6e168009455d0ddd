"""Whole steps on a device that records them: nothing is used before it is there, or too long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from toy_steps import STEPS, races_of

from polyshard.testing.streams import Recorder


@pytest.mark.parametrize("run", STEPS, ids=lambda run: run.__name__)
def test_a_step_is_ordered(run: Callable[[Recorder], None]) -> None:
    assert races_of(run) == []
