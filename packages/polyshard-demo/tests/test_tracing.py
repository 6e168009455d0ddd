"""``--trace``: what it refuses, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyshard_demo import plugins
from polyshard_demo.errors import DemoError
from polyshard_demo.launch import launch
from polyshard_demo.settings import Settings


def test_a_folder_without_traces(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"--trace .* has no rank0\.json"):
        plugins.merge_trace(tmp_path)


def test_two_ranks_leave_one_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    traces = tmp_path / "traces"
    fixed = {
        "preset": "tiny",
        "steps": 3,
        "batch": 4,
        "sequence": 32,
        "device": "cpu",
        "page": False,
    }
    launch(Settings(out=tmp_path / "run", trace=traces, eval_batches=1, **fixed))  # type: ignore[arg-type]
    said = capfd.readouterr().out
    assert f"tracing every step in {traces}" in said
    assert f"traced to {traces / 'trace.json'} (2 ranks, clocks within " in said
    events = json.loads((traces / "trace.json").read_text("ascii"))["traceEvents"]
    steps = [(e["pid"], e["name"]) for e in events if e.get("cat") == "optimizer"]
    assert sorted(steps) == [(rank, "AdamW") for rank in (0, 0, 0, 1, 1, 1)]
    units = {e["name"] for e in events if e.get("cat") == "gather"}
    assert "(root)" in units
    assert "blocks.0" in units
