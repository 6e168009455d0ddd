"""What is said of a run while it runs."""

from __future__ import annotations

import itertools
import re

import pytest

from polyshard_demo import progress
from polyshard_demo.history import Step


def test_lines_say_how_long_the_rest_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds a step, in a run that was resumed after the second of six."""
    ticks = itertools.count(100.0, 10.0)
    monkeypatch.setattr(progress, "time", type("Clock", (), {"monotonic": lambda: next(ticks)}))
    display = progress.Display(2, 6, 1, silent=False)
    for step in range(3, 7):
        display.step(Step(step, 2.5, 1.0, 1e-3, 256, 10.0), 1 << 20)
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r".*MiB ?", "", line).strip() for line in lines] == [
        "0:00:30 left",
        "0:00:20 left",
        "0:00:10 left",
        "",
    ]
    assert lines[0].startswith("step     3/6  loss 2.5000")
