"""What happens to files between a save and a load, and to saves that fail."""

from __future__ import annotations

import io
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from toy_models import build
from toy_pickles import Call, make
from toy_runs import Job, assert_equal, whole

from polyshard.errors import CheckpointError, IneffectiveSettingWarning, SettingError
from polyshard_checkpoint import Checkpoints, TrainingState, manifest
from polyshard_checkpoint.manifest import NAME, FileSum, Manifest, file_sum
from polyshard_testing import ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def saved(folder: Path, *steps: int, keep: int | None = None) -> dict[int, Any]:
    """Checkpoints of a model that differ; returns the weights of each."""
    weights = {}
    for step in steps:
        model = build(step, width=8, hidden=8, layers=1)
        Checkpoints(folder, keep=keep).save(step, TrainingState(model))
        weights[step] = whole(model)
    return weights


def state() -> TrainingState:
    return TrainingState(build(99, width=8, hidden=8, layers=1))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link(path: Path) -> None:
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize(
    ("harm", "file"),
    [
        *product((flip, truncate, link, Path.unlink), ("__0_0.distcp", ".metadata")),
        *product((flip, truncate, Path.unlink), (NAME,)),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, harm: Callable[[Path], None], file: str
) -> None:
    weights = saved(tmp_path, 1, 2)
    harm(tmp_path / "step-000002" / file)
    found = state()
    with pytest.warns(IneffectiveSettingWarning, match="step-000002"):
        restored = Checkpoints(tmp_path).load(found)
    assert restored is not None
    assert restored.step == 1
    assert "step-000002" in restored.notes[0]
    assert_equal(whole(found.model), weights[1])


@ranks(2)
@pytest.mark.parametrize("reader", [0, 1])
def test_a_file_that_one_rank_cannot_read_is_damage(
    rank: int, size: int, tmp_path: Path, reader: int
) -> None:
    """A bad sector; the peers of who meets it must not wait for it."""
    job = Job.start(rank, size)
    Checkpoints(tmp_path).save(1, job.state)
    Checkpoints(tmp_path).save(2, job.state)

    def broken(path: Path) -> str:
        if path.parent.name == "step-000002" and rank == reader:
            raise OSError(5, "Input/output error")
        return file_sum(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifest, "file_sum", broken)
        with pytest.warns(IneffectiveSettingWarning, match="cannot be read: Input/output error"):
            restored = Checkpoints(tmp_path).load(job.state)
    assert restored is not None
    assert restored.step == 1


def rewritten(folder: Path, **changes: Any) -> None:
    """With a manifest of other content, and its checksum."""
    replace(Manifest.read(folder), **changes).write(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"order": "2"},
        {"order": True},
        {"step": None},
        {"step": -1},
        {"files": {"..": FileSum(1, "")}},
        {"files": {"a": FileSum(-1, "")}},
        {"files": {"a/b": FileSum(1, "")}},
    ],
)
def test_a_manifest_of_other_types_is_passed_over(tmp_path: Path, changes: dict[str, Any]) -> None:
    saved(tmp_path, 1, 2)
    rewritten(tmp_path / "step-000002", **changes)
    with pytest.warns(IneffectiveSettingWarning, match=r"step-000002.*no manifest"):
        restored = Checkpoints(tmp_path).load(state())
    assert restored is not None
    assert restored.step == 1


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_without_a_checksum_is_not_read(tmp_path: Path, name: str) -> None:
    saved(tmp_path, 1)
    folder = tmp_path / "step-000001"
    files = {n: s for n, s in Manifest.read(folder).files.items() if n != name}
    rewritten(folder, files=files)
    with pytest.raises(CheckpointError, match=rf"{name}, which has no checksum"):
        Checkpoints(tmp_path).load(state())


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for folder in tmp_path.iterdir():
        flip(folder / "__0_0.distcp")
    found = state()
    before = whole(found.model)
    with pytest.raises(CheckpointError, match=r"step-000002.*has changed.*step-000001"):
        Checkpoints(tmp_path).load(found)
    assert_equal(whole(found.model), before)


def test_one_that_is_asked_for_is_not_replaced_by_another(tmp_path: Path) -> None:
    weights = saved(tmp_path, 1, 2, 3)
    found = state()
    restored = Checkpoints(tmp_path).load(found, tmp_path / "step-000002")
    assert restored is not None
    assert restored.step == 2
    assert_equal(whole(found.model), weights[2])
    flip(tmp_path / "step-000002" / ".metadata")
    with pytest.raises(CheckpointError, match="step-000002"):
        Checkpoints(tmp_path).load(found, tmp_path / "step-000002")
    with pytest.raises(CheckpointError, match="No such file"):
        Checkpoints(tmp_path).load(found, tmp_path / "step-000009")


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    """A run that went back to an earlier step continues from its own, not from what it left."""
    saved(tmp_path, 1, 2, 3)
    checkpoints, found = Checkpoints(tmp_path, keep=None), state()
    checkpoints.load(found, tmp_path / "step-000001")
    checkpoints.save(2, found)
    restored = checkpoints.load(state())
    assert restored is not None
    assert (restored.step, restored.path.name) == (2, "step-000002.2")


def test_rotation_keeps_the_newest_intact(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    flip(tmp_path / "step-000003" / "__0_0.distcp")
    checkpoints, found = Checkpoints(tmp_path, keep=2), state()
    with pytest.warns(IneffectiveSettingWarning, match="step-000003"):
        checkpoints.load(found)
    checkpoints.save(4, found)
    intact = {"step-000002", "step-000004"}
    assert intact <= {p.name for p in tmp_path.iterdir()}, "the damaged one did not count"


def test_links_are_not_followed_when_old_ones_go(tmp_path: Path) -> None:
    saved(tmp_path / "other", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000001").symlink_to(tmp_path / "other" / "step-000001")
    saved(tmp_path / "run", 2, 3, keep=1)
    assert (tmp_path / "other" / "step-000001" / NAME).exists()


def test_left_overs_of_killed_jobs_go(tmp_path: Path) -> None:
    left = tmp_path / ".unfinished-abc"
    left.mkdir()
    (left / "file").touch()
    saved(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_what_is_kept_is_a_positive_number(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


class Broken:
    """State that fails on one rank."""

    def __init__(self, rank: int, method: str) -> None:
        self.rank, self.method = rank, method

    def state_dict(self) -> dict[str, Any]:
        if (self.rank, self.method) == (1, "save"):
            raise RuntimeError("no memory for this")
        return {"rank": self.rank}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (self.rank, self.method) == (1, "load"):
            raise RuntimeError("no memory for that")


@ranks(2)
@pytest.mark.parametrize("method", ["save", "load"])
def test_a_rank_that_fails_is_quoted_on_all(
    rank: int, size: int, tmp_path: Path, method: str
) -> None:
    job = Job.start(rank, size)
    Checkpoints(tmp_path).save(1, job.state)
    broken = TrainingState(job.model, per_rank={"broken": Broken(rank, method)})
    if method == "load":
        Checkpoints(tmp_path).save(2, broken)
    said = r"rank 1: .*'broken'.*no memory for th"
    with pytest.raises(CheckpointError, match=said):
        getattr(Checkpoints(tmp_path), method)(*([2] if method == "save" else []), broken)
    assert (tmp_path / "step-000001" / NAME).exists()


@ranks(2)
def test_a_full_disk_loses_nothing(rank: int, size: int, tmp_path: Path) -> None:
    """The limit on file sizes fails writes as a full disk does, in the middle of a file."""
    job = Job.start(rank, size)
    job.train(1)
    checkpoints = Checkpoints(tmp_path)  # its group is made before the limit: that takes a file too
    checkpoints.save(1, job.state)
    before = whole(job.model)
    job.train(1)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.SIG_IGN
    previous = signal.signal(signal.SIGXFSZ, handler)
    try:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(CheckpointError, match=r"step 2 .*File too large"):
            checkpoints.save(2, job.state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    Checkpoints(tmp_path).load(job.state)
    assert_equal(whole(job.model), before)
    Checkpoints(tmp_path).save(2, job.state)


def test_what_could_not_be_loaded_safely_is_not_saved(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("here")}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    with pytest.raises(CheckpointError, match=r"'polyshard\.shared\.odd'.*plain data"):
        Checkpoints(tmp_path).save(1, TrainingState(build(), shared={"odd": Odd()}))


@pytest.mark.parametrize("name", ["plugins", "random"])
def test_names_of_what_is_saved_by_itself_are_taken(name: str) -> None:
    with pytest.raises(SettingError, match=name):
        TrainingState(build(), per_rank={name: Broken(0, "none")})


@ranks(2)
def test_a_sharded_tensor_beside_the_model_is_refused(rank: int, size: int, tmp_path: Path) -> None:
    """It would come back whole and on the host, which its owner does not expect."""
    job = Job.start(rank, size)
    average = {"weight": job.model.head.weight.detach()}

    class Average(Broken):
        def state_dict(self) -> dict[str, Any]:
            return average

    shared = {"average": Average(rank, "none")}
    with pytest.raises(CheckpointError, match=r"shared\.average.*DTensor.*put it in the model"):
        Checkpoints(tmp_path).save(1, TrainingState(job.model, shared=shared))


def test_a_checkpoint_that_lacks_state_says_what(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    more = TrainingState(state().model, shared={"scheduler": Broken(0, "none")})
    with pytest.raises(CheckpointError, match=r"no state of 'scheduler'. Leave it out"):
        Checkpoints(tmp_path).load(more)


def test_another_model_says_so(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"step-000001.*blocks\.1"):
        Checkpoints(tmp_path).load(TrainingState(build(0, width=8, hidden=8, layers=2)))


def test_a_checkpoint_with_valid_sums_still_runs_nothing(tmp_path: Path) -> None:
    """The author of a checkpoint can write its checksums too."""
    saved(tmp_path, 1)
    folder, victim = tmp_path / "step-000001", tmp_path / "pwned"
    content = io.BytesIO()
    torch.save({"python": Call(make, victim)}, content)
    model = build(99, width=8, hidden=8, layers=1)
    shutil.rmtree(folder)
    dcp.save(
        {"model": model.state_dict(), "polyshard.rank0of1.random.form": content.getvalue()},
        checkpoint_id=folder,
        no_dist=True,
    )
    sums = {p.name: FileSum(p.stat().st_size, file_sum(p)) for p in folder.iterdir()}
    Manifest(1, 0, 1, torch.__version__, sums).write(folder)
    with pytest.raises(CheckpointError, match=r"'polyshard\.rank0of1\.random' cannot be read"):
        Checkpoints(tmp_path).load(TrainingState(model))
    assert not victim.exists()
