"""The page in the end: what is on it, and when there is none."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyshard_demo import page, prediction
from polyshard_demo.launch import launch
from polyshard_demo.settings import Settings


def tiny(out: Path, **options: Any) -> Settings:
    fixed = {"preset": "tiny", "steps": 2, "batch": 4, "sequence": 31, "eval_batches": 1}
    return Settings(**{"out": out, "device": "cpu", **fixed, **options})


def sent(run: Path) -> list[int]:
    """Bytes of the last step, by rank."""
    found = json.loads((run / "report.json").read_text("utf-8"))
    return [rank["step_sent_bytes"] for rank in found["ranks"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        launch(tiny(out))
    return out


def test_bytes_are_those_that_were_predicted(run: Path) -> None:
    """The sequence is not its preset's; evaluations and checkpoints count for no step."""
    plans = prediction.predicted(tiny(run), is_cpu=True)
    assert [facts.sent_bytes for _, facts in plans.values()] == sent(run)
    assert min(sent(run)) > 0


def test_the_page_has_both_sides(run: Path) -> None:
    """It is there when the run has ended."""
    text = (run / "report.html").read_text("utf-8")
    assert text.count(">exact</td>") == 2
    assert "Time is not predicted: no machine was named" in text
    assert "Traffic by axis" in text
    for rank in json.loads((run / "report.json").read_text("utf-8"))["ranks"]:
        held = rank["resident_bytes"] - rank["before_bytes"]
        assert 0 < held < rank["resident_bytes"]
        assert f"({held:,})" in text


def test_time_is_predicted_for_a_machine_that_was_named(run: Path) -> None:
    path = run / "report.html"
    before = path.read_text("utf-8")
    said = page.write_page(tiny(run, machine="a100x8"))
    assert said == f"the run beside its prediction: {path}"
    text = path.read_text("utf-8")
    path.write_text(before, "utf-8")
    assert "An estimate for a100x8" in text
    assert "no machine was named" not in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"engine": "torch"},
            "a plan is of polyshard's own engine, and this run's was torch",
        ),
        ({"accumulate": 2}, "a plan is of one forward and backward a step, and gradients"),
        ({"machine": "nowhere.json"}, "the plan could not be made (PlanError: --machine nowhere"),
    ],
    ids=str,
)
def test_what_is_not_planned_is_said(run: Path, options: dict[str, Any], expected: str) -> None:
    """What happened is there all the same, and the run has not failed."""
    page.write_page(tiny(run, **options))
    text = (run / "report.html").read_text("utf-8")
    assert f"<p>Nothing is predicted: {html.escape(expected)}" in text
    assert "Traffic by axis" not in text
    assert f"({sent(run)[0]:,})" in text


def test_a_page_that_cannot_be_made_fails_nothing(tmp_path: Path) -> None:
    assert page.write_page(tiny(tmp_path)).startswith("without report.html: FileNotFoundError: ")


def test_settings_become_those_of_a_plan(tmp_path: Path) -> None:
    pytest.importorskip("polyshard_offload")
    pytest.importorskip("polyshard_quantized")
    given = tiny(tmp_path, ranks=4, shard_ranks=2, quantize="int8", bf16=True)
    given = replace(given, offload=f"optimizer=host, path={tmp_path},fraction=0.5")
    found = prediction.plan_settings(given, is_cpu=True)
    assert [(a.name, a.size) for a in found.mesh.axes] == [("replicate", 2), ("dp", 2)]
    assert (found.quantize, found.bf16, found.backend) == ("int8", True, "gloo")
    assert found.offload == "optimizer=host,fraction=0.5"
    assert (found.local_batch, found.sequence) == (1, 31)
    assert prediction.plan_settings(given, is_cpu=False).backend == "nccl"
