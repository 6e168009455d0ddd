"""The page in the end: what is asked of a plan, and when there is none; `test_run.py` has pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyshard_demo import page
from polyshard_demo.settings import Settings


def test_a_page_that_cannot_be_made_fails_nothing(tmp_path: Path) -> None:
    said = page.write_page(Settings(out=tmp_path))
    assert said.startswith("without report.html: FileNotFoundError: ")


def test_settings_become_those_of_a_plan(tmp_path: Path) -> None:
    pytest.importorskip("polyshard_offload")
    pytest.importorskip("polyshard_quantized")
    offload = f"optimizer=disk, path={tmp_path},fraction=0.5"
    given = Settings(
        out=tmp_path, ranks=4, shard_ranks=2, batch=8, accumulate=2, sequence=31, preset="tiny",
        quantize="int8", offload=offload, bf16=True,
    )  # fmt: skip
    found = page.plan_settings(given, is_cpu=True)
    assert [(a.name, a.size) for a in found.mesh.axes] == [("replicate", 2), ("dp", 2)]
    assert (found.quantize, found.offload, found.bf16) == ("int8", offload, True)
    assert (found.local_batch, found.sequence, found.backend) == (1, 31, "gloo")
    assert page.plan_settings(given, is_cpu=False).backend == "nccl"
    assert len(page.predicted(given, is_cpu=True)) == 4
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"
