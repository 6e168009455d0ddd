"""Whole runs of the demo: engines, ranks, resuming, what a run leaves, and failing ranks.

Runs of several ranks start processes of their own, so two of them serve most tests, and runs of one
rank happen in this process.
"""

import html
import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from toy_pickles import Call, make

from polyshard_checkpoint.manifest import FileSum, Manifest, file_sum
from polyshard_demo import page
from polyshard_demo.checkpoint import find_source, folder_of, write_run
from polyshard_demo.errors import DemoError, RankError
from polyshard_demo.launch import launch, run_local_ranks
from polyshard_demo.settings import AUTO, EngineName, Settings
from polyshard_demo.text import load_corpus

ENGINES = ["polyshard", "torch"]
STEPS = 6

BROKEN = """
import torch
from polyshard_demo.ranks import join, mean

def work(settings):
    with join(settings) as place:
        if place.rank == 1:
            raise ArithmeticError("broken on purpose")
        mean([torch.ones(())])
"""


def tiny(out: Path, **options: Any) -> Settings:
    """Six steps of the smallest model, checkpoints after the third and the last."""
    fixed = {"preset": "tiny", "steps": STEPS, "batch": 4, "sequence": 32, "lr": 1e-2}
    often = {"checkpoint_every": 3, "eval_every": 3, "eval_batches": 2}
    rest = {"device": "cpu", "page": False}
    return Settings(**{"out": out, **fixed, **often, **rest, **options})


def report(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "report.json").read_text())
    return found


def losses(run: Path) -> list[float]:
    """Training losses, then held-out ones."""
    found = report(run)
    return [entry["loss"] for entry in found["steps"] + found["evaluations"]]


def sent(run: Path) -> list[int]:
    """Bytes of the last step, by rank."""
    return [rank["step_sent_bytes"] for rank in report(run)["ranks"]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of torch's engine on two ranks."""
    out = tmp_path_factory.mktemp("reference")
    launch(tiny(out, engine="torch"))
    return out


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of polyshard's engine on two ranks, with everything that a run can leave."""
    out = tmp_path_factory.mktemp("traced")
    launch(tiny(out, trace=out / "traces", page=True))
    return out


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the only rank, as torchrun would have started it."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_report_says_what_happened(reference: Path) -> None:
    found = report(reference)
    assert [step["step"] for step in found["steps"]] == list(range(1, STEPS + 1))
    assert [entry["step"] for entry in found["evaluations"]] == [3, 6]
    assert found["steps"][0]["loss"] == pytest.approx(5.55, abs=0.1)
    # The default text ships with Python and differs between versions, and so does the loss.
    assert losses(reference)[STEPS - 1] < losses(reference)[0] - 0.7
    assert found["tokens_per_second"] > 0
    assert [rank["sent_bytes"] for rank in found["ranks"]] == [None, None]
    assert all(rank["resident_bytes"] > 1 << 20 for rank in found["ranks"])
    assert (reference / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_polyshard_equals_torch_bitwise_at_two_ranks(reference: Path, traced: Path) -> None:
    assert losses(traced) == losses(reference)
    assert all(rank["sent_bytes"] > 0 for rank in report(traced)["ranks"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_resume_at_the_same_world_size_is_bitwise(
    engine: EngineName, reference: Path, tmp_path: Path
) -> None:
    start = reference / "checkpoints" / "step-000003"
    launch(tiny(tmp_path, engine=engine, resume=start))
    assert losses(tmp_path) == losses(reference)


def test_replicas_do_not_change_the_losses(reference: Path, tmp_path: Path) -> None:
    """And a run continues with replicas where it had shards."""
    start = reference / "checkpoints" / "step-000003"
    launch(tiny(tmp_path, shard_ranks=1, resume=start, timeout=60))
    assert losses(tmp_path) == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("engine", [*ENGINES, "single"])
def test_resume_at_another_world_size(engine: EngineName, reference: Path, tmp_path: Path) -> None:
    start = reference / "checkpoints" / "step-000003"
    launch(tiny(tmp_path, engine=engine, ranks=1, resume=start))
    assert losses(tmp_path) == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("engine", [*ENGINES, "single"])
def test_ranks_micro_batches_and_guards_do_not_change_the_losses(
    engine: EngineName, reference: Path, tmp_path: Path
) -> None:
    launch(tiny(tmp_path, engine=engine, ranks=1, accumulate=2, guards=True))
    assert losses(tmp_path) == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_dropout_follows_from_seed_and_step(reference: Path, tmp_path: Path) -> None:
    """So that nothing of it has to be saved, and every engine leaves out the same."""
    given: dict[str, Any] = {"ranks": 1, "dropout": 0.2, "accumulate": 2}
    launch(tiny(tmp_path / "whole", engine="single", **given))
    whole = losses(tmp_path / "whole")
    assert whole != pytest.approx(losses(reference), rel=1e-3)
    start = tmp_path / "whole" / "checkpoints" / "step-000003"
    launch(tiny(tmp_path / "again", engine="single", resume=start, **given))
    assert losses(tmp_path / "again") == whole
    launch(tiny(tmp_path / "sharded", resume=start, **given))
    assert losses(tmp_path / "sharded") == pytest.approx(whole, rel=1e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_with_tied_head_learns_about_the_same(
    engine: EngineName, reference: Path, tmp_path: Path
) -> None:
    launch(tiny(tmp_path, engine=engine, ranks=1, bf16=True, tied=True))
    assert losses(tmp_path) == pytest.approx(losses(reference), rel=0.1)


def test_two_ranks_leave_one_trace(traced: Path) -> None:
    events = json.loads((traced / "traces" / "trace.json").read_text("ascii"))["traceEvents"]
    steps = [(e["pid"], e["name"]) for e in events if e.get("cat") == "optimizer"]
    assert sorted(steps) == [(rank, "AdamW") for rank in (0, 1) for _ in range(STEPS)]
    units = {e["name"] for e in events if e.get("cat") == "gather"}
    assert {"(root)", "blocks.0"} <= units


def test_bytes_are_those_that_were_predicted(traced: Path) -> None:
    """The sequence is not its preset's; evaluations and checkpoints count for no step."""
    plans = page.predicted(tiny(traced), is_cpu=True)
    assert [facts.sent_bytes for _, facts in plans.values()] == sent(traced)
    assert min(sent(traced)) > 0


def test_the_page_has_both_sides(traced: Path) -> None:
    """It is there when the run has ended."""
    text = (traced / "report.html").read_text("utf-8")
    assert text.count(">exact</td>") == 2
    assert "Time is not predicted: no machine was named" in text
    assert "Traffic by axis" in text
    for rank in report(traced)["ranks"]:
        held = rank["resident_bytes"] - rank["before_bytes"]
        assert 0 < held < rank["resident_bytes"]
        assert f"({held:,})" in text


@pytest.fixture
def copied(traced: Path, tmp_path: Path) -> Path:
    """A run directory in which a page can be written again."""
    (tmp_path / "report.json").write_bytes((traced / "report.json").read_bytes())
    return tmp_path


def test_time_is_predicted_for_a_machine_that_was_named(copied: Path) -> None:
    path = copied / "report.html"
    said = page.write_page(tiny(copied, machine="a100x8"))
    assert said == f"the run beside its prediction: {path}"
    text = path.read_text("utf-8")
    assert "An estimate for a100x8" in text
    assert "no machine was named" not in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"engine": "torch"}, "a plan is of polyshard's engine, this run's was torch"),
        ({"machine": "nowhere.json"}, "--machine nowhere"),
    ],
    ids=str,
)
def test_what_is_not_planned_is_said(copied: Path, options: dict[str, Any], expected: str) -> None:
    """What happened is there all the same, and the run has not failed."""
    page.write_page(tiny(copied, **options))
    text = (copied / "report.html").read_text("utf-8")
    assert f"<p>Nothing is predicted (PlanError): {html.escape(expected)}" in text
    assert "Traffic by axis" not in text
    assert f"({sent(copied)[0]:,})" in text


@pytest.mark.usefixtures("one_rank")
def test_bytes_of_accumulated_gradients_are_predicted(tmp_path: Path) -> None:
    given = tiny(tmp_path, ranks=1, accumulate=2, steps=1)
    launch(given)
    plans = page.predicted(given, is_cpu=True)
    assert [facts.sent_bytes for _, facts in plans.values()] == sent(tmp_path)


@pytest.mark.usefixtures("one_rank")
def test_a_run_goes_on_from_its_newest_intact_checkpoint(tmp_path: Path) -> None:
    settings = tiny(tmp_path, engine="single", ranks=1, checkpoint_every=1, steps=4)
    resumed = replace(settings, resume=AUTO)
    launch(resumed)  # nothing there: starts anew
    folder, whole = folder_of(tmp_path), losses(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000003", "step-000004"]
    with pytest.raises(DemoError, match="already holds checkpoints"):
        launch(settings)
    with pytest.raises(DemoError, match="--seed: saved 0, now 1"):
        launch(replace(resumed, seed=1))
    tensors = folder / "step-000004" / "__0_0.distcp"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step-000004 is damaged"):
        launch(resumed)
    assert losses(tmp_path) == whole
    for path in folder.glob("step-*/__0_0.distcp"):
        path.unlink()
    with pytest.raises(DemoError, match=r"cannot resume from .*is intact.*is missing"):
        launch(resumed)


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_was_written_to_harm_runs_nothing(tmp_path: Path) -> None:
    victim, folder = tmp_path / "pwned", folder_of(tmp_path) / "step-000001"
    settings = tiny(tmp_path, resume=tmp_path, ranks=1, engine="single")
    write_run(settings, load_corpus(None, settings.sequence))
    folder.mkdir(parents=True)
    evil = folder / ".metadata"
    evil.write_bytes(pickle.dumps(Call(make, victim)))
    sums = {evil.name: FileSum(evil.stat().st_size, file_sum(evil))}
    Manifest(1, 0, 1, "2.13", sums).write(folder)
    with pytest.raises(DemoError, match=r"cannot resume from .*it names .*make"):
        launch(settings)
    assert not victim.exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"settings": 3}', "[" * 100_000])
def test_a_bad_record_says_which(tmp_path: Path, text: str) -> None:
    (folder_of(tmp_path) / "step-000001").mkdir(parents=True)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DemoError, match=r"cannot read .*run\.json"):
        find_source(tiny(tmp_path, resume=tmp_path), load_corpus(None, 32))


def test_checkpoints_of_another_run_are_not_replaced(tmp_path: Path) -> None:
    for run in ("a", "b"):
        folder = folder_of(tmp_path / run) / "step-000001"
        folder.mkdir(parents=True)
        Manifest(1, 0, 1, "2.13", {}).write(folder)
    with pytest.raises(DemoError, match="already holds checkpoints; resume from them with"):
        find_source(tiny(tmp_path / "b", resume=tmp_path / "a"), load_corpus(None, 32))


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="no checkpoint there"):
        launch(tiny(tmp_path, resume=tmp_path))


def test_another_text_cannot_be_resumed(reference: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("another text " * 100)
    with pytest.raises(DemoError, match=r"other\.txt"):
        launch(tiny(tmp_path / "run", resume=reference, text=tmp_path / "other.txt"))


def test_failing_rank_ends_the_run_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rank.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    import broken_rank  # type: ignore[import-not-found]

    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed") as caught:
        run_local_ranks(broken_rank.work, tiny(tmp_path))
    assert "ArithmeticError: broken on purpose" in str(caught.value)
    assert "broken_rank.py" in str(caught.value)
    assert time.monotonic() - started < 60


def test_restarts_that_could_not_work_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchrun sets by default; ``test_kills.py`` shows that the other way works."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(DemoError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        launch(tiny(tmp_path))
